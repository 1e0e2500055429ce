from __future__ import annotations

import gc
from pathlib import Path

import torch

import ptpipe
from ptpipe_torch import Model
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
"""


def graph_modules() -> int:
    gc.collect()
    return sum(issubclass(type(thing), torch.fx.GraphModule) for thing in gc.get_objects())


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
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if isinstance(thing, torch.nn.Parameter)]
    assert not [tensor.shape for tensor in tensors if HIDDEN in tensor.shape]
    assert network(*zeros(model.signature.inputs, 2)).shape == (2, 10)
