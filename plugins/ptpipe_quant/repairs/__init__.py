"""Repairs of post-training quantization: kinds that change weights or biases so that int8 loses less."""

from __future__ import annotations

from ptpipe import Context, stage
from ptpipe_quant.repairs.config import (
    AdaroundConfig,
    BiasCorrectConfig,
    EqualizeConfig,
    SmoothConfig,
)
from ptpipe_torch import Data, Model


@stage("quant.equalize", packages=("torch",))
def equalize(config: EqualizeConfig, ctx: Context, model: Model) -> Model:
    """Even out the ranges of weights between consecutive layers of a float model, before quant.prepare.

    Scales each channel down in one layer and up in the next, through ReLU, LeakyReLU, PReLU and pooling, so that one
    scale for a whole weight fits all of its channels; batch norms count as folded. The network computes the same, which
    is checked. For weights with one scale per tensor; needs no data. Layers in front of ReLU6, or whose output is also
    added to something else, are left alone. Fails if a line of the network can't be traced, and names it, or if there
    is nothing to equalize.
    """
    from ptpipe_quant.repairs.equalize import equalize

    return equalize(config, ctx, model)


@stage("quant.smooth", packages=("torch",))
def smooth(config: SmoothConfig, ctx: Context, model: Model, data: Data) -> Model:
    """Move differences between activations' channels into weights (SmoothQuant), before quant.prepare.

    For transformers, where a few channels behind layer norms are far larger than the rest, with which they share one
    int8 range. Divides each channel by a factor, in a layer norm or in a linear layer with ReLU, and multiplies the
    weights of the linear layers (or the attention) behind it. The network computes the same, which is checked;
    calibration data tell how large channels get. Fails if a line of the network can't be traced, and names it, or if
    there is nothing to smooth.
    """
    from ptpipe_quant.repairs.smooth import smooth

    return smooth(config, ctx, model, data)


@stage("quant.adaround", packages=("torch",))
def adaround(config: AdaroundConfig, ctx: Context, model: Model, data: Data) -> Model:
    """Learn for each weight whether to round it up or down, between quant.calibrate and quant.convert.

    Each layer in turn is fitted to the output of the float one, by some thousand optimizer steps on calibration data,
    without labels. A layer that doesn't gain keeps nearest rounding. Fails if the model is not from quant.prepare, or
    if its observers saw no data.
    """
    from ptpipe_quant.repairs.adaround import adaround

    return adaround(config, ctx, model, data)


@stage("quant.bias_correct", packages=("torch",))
def bias_correct(config: BiasCorrectConfig, ctx: Context, model: Model, data: Data) -> Model:
    """Correct the means of layers, which rounding shifts, between quant.calibrate and quant.convert.

    Layer by layer, the mean difference between quantized and float output over calibration data is subtracted from each
    channel's bias. The last repair before quant.convert, behind quant.adaround. Fails if the model is not from
    quant.prepare, if its observers saw no data, or if its biases are corrected already.
    """
    from ptpipe_quant.repairs.bias_correct import bias_correct

    return bias_correct(config, ctx, model, data)


STAGES = (equalize, smooth, adaround, bias_correct)
"""The kinds, in the order in which a manifest may use them."""
