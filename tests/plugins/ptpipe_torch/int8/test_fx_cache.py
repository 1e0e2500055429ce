from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

import ptpipe
from ptpipe_quant.stages import calibrated_network
from ptpipe_quant.transforms import to_int8
from ptpipe_torch import Model, quantized_engine
from ptpipe_torch.int8.fx import reference_network
from ptpipe_torch.model import skeletons
from ptpipe_torch.model.example_inputs import zeros

HIDDEN = 97
"""Of a size that no other tensor has."""
MANIFEST = """
version: 1
name: fx
stages:
  data:       {uses: data.synthetic, with: {num_train: 16, num_test: 8, batch_size: 8}}
  net:        {uses: model.mlp, with: {hidden: [97]}}
  observed:   {uses: quant.prepare}
  calibrated: {uses: quant.calibrate, needs: {model: observed}}
  int8:       {uses: quant.convert, needs: {model: calibrated.model}}
  fake_quant: {uses: quant.prepare_qat, needs: {model: net}}
  finetuned:  {uses: train.supervised, needs: {model: fake_quant}, with: {epochs: 1}}
"""


def collect() -> None:
    """Free what nothing refers to but the networks that are kept to be copied, without weights (`test_skeletons`)."""
    skeletons._kept.clear()
    gc.collect()


def graph_modules() -> int:
    collect()
    return sum(issubclass(type(thing), torch.fx.GraphModule) for thing in gc.get_objects())


def hidden_parameters() -> list[torch.Tensor]:
    """Float weights of the hidden layer; packed int8 layers have its bias."""
    collect()
    tensors = [thing for thing in gc.get_objects() if isinstance(thing, torch.nn.Parameter)]
    return [tensor for tensor in tensors if HIDDEN in tensor.shape and tensor.dim() > 1]


def test_no_quantized_network_stays_in_memory_after_its_stage(tmp_path: Path) -> None:
    """`torch.ao` caches every network that it prepares or converts under itself, for the life of the process."""
    (tmp_path / "fx.yaml").write_text(MANIFEST)
    before = graph_modules()
    result = ptpipe.run(tmp_path / "fx.yaml", artifacts=tmp_path / "artifacts")
    assert {stage.outcome for stage in result.stages.values()} == {"done"}
    assert graph_modules() == before


def test_an_int8_network_does_not_keep_the_float_weights_that_it_was_made_of(tmp_path: Path) -> None:
    """torch.ao notes the layers of the prepared network in the graph of the converted one."""
    (tmp_path / "fx.yaml").write_text(MANIFEST)
    ptpipe.run(tmp_path / "fx.yaml", artifacts=tmp_path / "artifacts")
    (folder,) = (tmp_path / "artifacts" / "runs").glob("*/int8")
    model = Model.load(folder)
    network = model.build()
    assert not hidden_parameters()
    assert network(*zeros(model.signature.inputs, 2)).shape == (2, 10)


@pytest.mark.parametrize(("stage", "output"), [("calibrated", "model"), ("finetuned", None)])
def test_a_network_keeps_no_layers_once_it_was_converted(tmp_path: Path, stage: str, output: str | None) -> None:
    """torch.ao's qconfigs refer to the layers that they were made for, and to those of the prepared network."""
    (tmp_path / "fx.yaml").write_text(MANIFEST)
    result = ptpipe.run(tmp_path / "fx.yaml", artifacts=tmp_path / "artifacts")
    model = result.artifact(stage, output)
    assert isinstance(model, Model)
    with quantized_engine("fbgemm"):
        prepared = calibrated_network(model, "test")
        assert hidden_parameters()
        int8 = to_int8(prepared, backend="fbgemm")
        assert not hidden_parameters()
        assert int8(*zeros(model.signature.inputs, 2)).shape == (2, 10)
        prepared = calibrated_network(model, "test")
        reference, _ = reference_network(prepared)
    own = {id(tensor) for tensor in reference.parameters()}
    assert own and {id(tensor) for tensor in hidden_parameters()} <= own
