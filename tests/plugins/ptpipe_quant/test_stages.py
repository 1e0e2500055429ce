"""The quant stages on handwritten digits: every backend and method, and their errors."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ptpipe import Context, StageError
from ptpipe.events import Progress
from ptpipe_quant import (
    CalibrateConfig,
    ConvertConfig,
    DynamicConfig,
    PrepareConfig,
    PrepareQatConfig,
    calibrate,
    convert,
    dynamic,
    prepare,
    prepare_qat,
)
from ptpipe_quant.qat_layers import QatLayer
from ptpipe_torch import Data, Model
from ptpipe_torch.int8.engine import deprecations_silenced, quantized_engine
from ptpipe_torch.int8.layers import has_int8_weights

from ...processor import needs_vnni, reduced
from ...signatures import logits_from
from . import layerwise
from .conftest import (
    BACKENDS,
    accuracy,
    activated,
    convolution_only,
    logits_of,
    make_model,
    normalized_by_batch,
    nothing_to_quantize,
    small_net,
    train,
)

WEIGHTS = ["per_channel", "per_tensor"]
METHODS = ["dynamic", "static", "qat"]
FIRST = BACKENDS[0]


def int8(method: str, model: Model, data: Data, ctx, **options) -> Model:
    """Quantize the model by that method."""
    if method == "dynamic":
        return dynamic(DynamicConfig(**options), ctx, model)
    if method == "static":
        ready = calibrate(CalibrateConfig(), ctx, prepare(PrepareConfig(**options), ctx, model), data).model
    else:
        ready = train(prepare_qat(PrepareQatConfig(**options), ctx, model), data, lr=0.005)
    return convert(ConvertConfig(), ctx, ready)


def stored(model: Model, folder: Path) -> Model:
    folder.mkdir(parents=True)
    model.save(folder)
    return Model.load(folder)


Variants = Callable[[str], dict[str, Model]]


@pytest.fixture(scope="module")
def variants(trained, digits, tmp_path_factory) -> Variants:
    """Quantize for a backend by every method with both kinds of weights, once."""
    ctx = Context("int8", "quant.test", 7, tmp_path_factory.mktemp("scratch"))

    @functools.cache
    def of(backend: str) -> dict[str, Model]:
        options = {"backend": backend, "reduce_range": reduced(backend)}
        return {
            f"{method}-{weights}": int8(method, trained, digits, ctx, weights=weights, **options)
            for method in METHODS
            for weights in WEIGHTS
        }

    return of


@pytest.mark.thorough
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_variant_keeps_the_accuracy_at_a_quarter_of_the_size(variants, trained, digits, backend) -> None:
    float_accuracy = accuracy(logits_of(trained, digits), digits)
    assert float_accuracy > 0.93
    for name, model in variants(backend).items():
        assert accuracy(logits_of(model, digits), digits) > float_accuracy - 0.015, name
        assert model.int8_tensors is not None
        num_integers = sum(tensor.numel() for tensor in model.int8_tensors.values() if tensor.dtype == torch.int8)
        assert num_integers == 8 * 9 + 16 * 8 * 9 + 64 * 32 + 32 * 10


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "backends", [each for each in (BACKENDS[::2], BACKENDS[1::2]) if each], ids="+".join
)  # fbgemm+qnnpack
def test_the_same_bits_converted_stored_and_in_another_process(variants, digits, tmp_path, backends) -> None:
    models = {f"{backend}-{name}": model for backend in backends for name, model in variants(backend).items()}
    images_NCHW = next(digits.batches("test", batch_size=200)).inputs["images"].numpy()
    np.save(tmp_path / "images.npy", images_NCHW)
    for name, model in models.items():
        stored(model, tmp_path / name)
    code = (
        "import sys, numpy as np\nfrom pathlib import Path\nfrom ptpipe_torch import Model\n"
        "import ptpipe_quant\nsys.path.insert(0, sys.argv[2])\nimport quant_test_networks\n"
        "root = Path(sys.argv[1]); images = np.load(root / 'images.npy')\n"
        "for folder in sorted(path.parent for path in root.glob('*/recipe.json')):\n"
        "    with Model.load(folder).predictor(1) as predict: logits = predict({'images': images})['logits']\n"
        "    np.save(folder / 'logits.npy', logits)\n"
    )
    (tmp_path / "quant_test_networks.py").write_text(network_source(), encoding="utf-8")
    for folder in [path for path in tmp_path.iterdir() if path.is_dir()]:
        recipe = json.loads((folder / "recipe.json").read_text())
        recipe["builder"]["address"] = "quant_test_networks:small_net"
        (folder / "recipe.json").write_text(json.dumps(recipe))
    command = [sys.executable, "-W", "error", "-c", code, str(tmp_path), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")  # no warning either
    for name, model in models.items():
        there = np.load(tmp_path / name / "logits.npy")
        with model.predictor() as here, Model(model.recipe, model.tensors).predictor() as converted_again:
            assert np.array_equal(logits_from(here, images_NCHW), there), name
            assert np.array_equal(logits_from(converted_again, images_NCHW), there), name


def network_source() -> str:
    import inspect

    head = "from torch import nn\nfrom ptpipe_torch import builder\nNUM_CLASSES = 10\n"
    return head + inspect.getsource(small_net)


@pytest.mark.sampled(11)
@pytest.mark.parametrize("backend", [backend for backend in ("fbgemm", "qnnpack") if backend in BACKENDS])
@pytest.mark.parametrize("batch_norm", ["fold", "train"])
@pytest.mark.parametrize(("bf16", "learned"), [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("network", ["trained", "trained_mixed"])
def test_int8_computes_what_fake_quantization_computes(
    request, digits, ctx, network, bf16, learned, batch_norm, backend
) -> None:
    model = request.getfixturevalue(network)
    config = PrepareQatConfig(backend=backend, batch_norm=batch_norm, learned_step_size=learned)
    fine_tuned = train(prepare_qat(config, ctx, model), digits, lr=0.005, bf16=bf16)
    int8_model = convert(ConvertConfig(), ctx, fine_tuned)
    (batch,) = digits.batches("test", batch_size=600)
    steps = layerwise.differences(int8_model, batch.inputs["images"])
    assert sum(has_int8_weights(layer) for layer in int8_model.build().modules()) == (4 if network == "trained" else 7)
    assert len(steps) == (8 if network == "trained" else 17)
    for name, steps_of_layer in steps.items():
        assert steps_of_layer.max() < 1.01, name
        assert (steps_of_layer > 0.5).float().mean() < 0.05, name
    difference_NK, bound_NK = layerwise.output_steps(int8_model, batch.inputs["images"])
    assert (difference_NK < bound_NK + 0.01).all()
    assert difference_NK.mean() < 0.5

    fake_NK, real_NK = logits_of(fine_tuned, digits), logits_of(int8_model, digits)
    # Where bf16 rounds the gradients of step sizes, the weights depend on how many threads add them.
    of_trained = 0.995 if bf16 and learned else 0.998
    agreement = of_trained if network == "trained" else 0.98 if reduced(backend) else 0.99
    assert (fake_NK.argmax(1) == real_NK.argmax(1)).mean() > agreement
    # The mixed network has learned too little for its accuracy to stay in training.
    expected_NK = fake_NK if network == "trained_mixed" or reduced(backend) else logits_of(model, digits)
    assert accuracy(real_NK, digits) > accuracy(expected_NK, digits) - 0.015


@pytest.mark.sampled(3)
@pytest.mark.parametrize("backend", [backend for backend in ("fbgemm", "qnnpack") if backend in BACKENDS])
@pytest.mark.parametrize("batch_norm", ["fold", "train"])
def test_int8_weights_are_those_that_training_rounds_to(trained_mixed, digits, ctx, batch_norm, backend) -> None:
    """The largest of a channel, too, when it is negative: at the end of a range it must not lie between two."""
    config = PrepareQatConfig(backend=backend, batch_norm=batch_norm)
    fine_tuned = train(prepare_qat(config, ctx, trained_mixed), digits, lr=0.005)
    int8_model = convert(ConvertConfig(), ctx, fine_tuned).build()
    layers = {name: layer for name, layer in fine_tuned.build().named_modules() if isinstance(layer, QatLayer)}
    assert len(layers) == 7
    for name, layer in layers.items():
        factor_K = torch.ones(len(layer.weight))
        if hasattr(layer, "bn"):
            factor_K = layer.bn.weight / torch.sqrt(layer.bn.running_var + layer.bn.eps)
        expected = layer.weight_fake_quant(layer.weight * factor_K.reshape(-1, *[1] * (layer.weight.dim() - 1)))
        int8_weight = int8_model.get_submodule(name).weight().dequantize()
        torch.testing.assert_close(int8_weight, expected.detach(), rtol=1e-5, atol=0)


def zero_bias(net) -> None:
    net.get_submodule("4").set_weight_bias(net.get_submodule("4").weight(), torch.zeros(16))


def shift_zero_point(net) -> None:
    net.get_submodule("9").zero_point += 1


def change_input_scale(net) -> None:
    net.get_buffer("0_input_scale_0").mul_(1.01)


def negate_a_channel(net) -> None:
    weight = net.get_submodule("11").weight()
    integers = weight.int_repr()
    integers[3] = -integers[3]
    scales, zero_points = weight.q_per_channel_scales(), weight.q_per_channel_zero_points()
    changed = torch._make_per_channel_quantized_tensor(integers, scales, zero_points, 0)
    net.get_submodule("11").set_weight_bias(changed, net.get_submodule("11").bias())


@pytest.mark.parametrize(
    ("fault", "layer"),
    [
        (zero_bias, "_4"),
        (shift_zero_point, "_9"),
        (change_input_scale, "quantize_per_tensor"),
        (negate_a_channel, "_11"),
    ],
)
def test_the_comparison_by_layers_finds_the_faulty_layer(variants, digits, fault, layer) -> None:
    model = variants(FIRST)["qat-per_channel"]
    (batch,) = digits.batches("test", batch_size=600)
    with quantized_engine(FIRST), deprecations_silenced():
        net = model.build()
        fault(net)
        steps = layerwise.differences(model, batch.inputs["images"], net)
    assert [name for name, steps_of_layer in steps.items() if steps_of_layer.max() > 1.01] == [layer]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("method", METHODS)
def test_a_network_with_everything_in_it(trained_mixed, digits, ctx, metrics, method, backend) -> None:
    # Its depthwise layer saturates with 8 bits, see int8/test_engine.py; oneDNN's and qnnpack's don't.
    reduce_range = True if backend in ("fbgemm", "x86") else "auto"
    options = {"backend": backend, "weights": "per_channel", "reduce_range": reduce_range}
    model = int8(method, trained_mixed, digits, ctx, **options)
    lost = accuracy(logits_of(trained_mixed, digits), digits) - accuracy(logits_of(model, digits), digits)
    assert lost < 0.02
    assert metrics()["int8_layers"] == (2 if method == "dynamic" else 7)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["ELU", "LeakyReLU", "Hardswish", "Hardsigmoid", "Sigmoid", "Tanh", "ReLU6"])
def test_what_is_stored_has_the_grid_of_every_activation(digits, ctx, name) -> None:
    model = make_model(activated, name=name)
    for backend in (BACKENDS[0], BACKENDS[-1]):
        converted = int8("static", model, digits, ctx, backend=backend)
        found_NK, expected_NK = (logits_of(each, digits, 100) for each in (converted, model))
        assert np.square(found_NK - expected_NK).mean() < (0.1 * expected_NK.std()) ** 2, backend


@pytest.mark.parametrize("method", METHODS)
def test_a_network_that_needs_a_batch_of_images(digits, ctx, method) -> None:
    model = make_model(normalized_by_batch)
    found_NK, expected_NK = (logits_of(m, digits) for m in (int8(method, model, digits, ctx, backend=FIRST), model))
    assert np.isfinite(found_NK).all()
    if method != "qat":  # which trains
        assert np.corrcoef(found_NK.ravel(), expected_NK.ravel())[0, 1] > 0.95  # the norm magnifies rounding


@pytest.mark.sampled(4)
@pytest.mark.parametrize("observer", ["mse", "min_max", "moving_average", "percentile"])
@pytest.mark.parametrize("reduce_range", [True, pytest.param(False, marks=needs_vnni)])
def test_observers_and_ranges(trained, digits, ctx, metrics, observer, reduce_range) -> None:
    config = PrepareConfig(backend=FIRST, observer=observer, reduce_range=reduce_range)
    prepared = prepare(config, ctx, trained)
    figures = metrics()
    assert figures.pop("prepared_difference") < 1e-5
    assert figures == {
        "backend": FIRST,
        "weights": "per_channel",
        "reduce_range": reduce_range,
        "reduce_range_reason": "set by the option",
    }
    calibrated, ranges = calibrate(CalibrateConfig(num_samples=200), ctx, prepared, digits)
    assert ranges.num_samples == 200
    pixels_NHWC = digits.splits["calibration"].inputs["images"].take(np.arange(200))
    low, high = next(iter(ranges.limits.values()))
    if observer != "moving_average":
        assert (low, high) == pytest.approx(
            ((pixels_NHWC.min() / 255 - 0.3) / 0.35, (pixels_NHWC.max() / 255 - 0.3) / 0.35)
        )
    assert len(ranges.limits) == 5
    model = convert(ConvertConfig(), ctx, calibrated)
    assert accuracy(logits_of(model, digits), digits) > accuracy(logits_of(trained, digits), digits) - 0.015
    scale = next(value for name, value in model.int8_tensors.items() if name.endswith("input_scale_0"))
    if observer == "min_max":
        assert scale.item() == pytest.approx((high - low) / 255, rel=1e-5)


class TestSkip:
    @pytest.mark.parametrize("method", METHODS)
    def test_layers_stay_float(self, trained, digits, ctx, metrics, method) -> None:
        model = int8(method, trained, digits, ctx, backend=FIRST, skip=("11", "4"))
        assert accuracy(logits_of(model, digits), digits) > 0.9
        packed = model.int8_tensors
        assert packed is not None
        floats = {name for name, tensor in packed.items() if tensor.dim() >= 2 and tensor.is_floating_point()}
        assert {name.rpartition(".")[0].partition(".")[0] for name in floats} == {"4", "11"}
        assert metrics()["int8_layers"] == (1 if method == "dynamic" else 2)
        skipped = ["4 (Conv2d)", "11 (Linear)"]
        expected = {
            "dynamic": ["0 (Conv2d)", *skipped, "2 x BatchNorm2d"],
            "static": skipped,
            "qat": [*skipped, "1 x BatchNorm2d"],
        }
        assert metrics()["float_layers"] == expected[method]
        num_int8 = 64 * 32 if method == "dynamic" else 64 * 32 + 8 * 9
        num_parameters = num_int8 + (8 * 9 if method == "dynamic" else 0) + 16 * 8 * 9 + 32 * 10 + 32 + 10
        num_of_norms = {"dynamic": 2 * (8 + 16), "static": 8 + 16, "qat": 8 + 2 * 16}  # of a folded one a bias is left
        num_parameters += num_of_norms[method]
        assert metrics()["int8_parameters_fraction"] == round(num_int8 / num_parameters, 4)

    def test_a_whole_type(self, trained, digits, ctx, metrics) -> None:
        int8("static", trained, digits, ctx, backend=FIRST, skip=("Conv2d",))
        assert metrics()["int8_layers"] == 2

    @pytest.mark.parametrize(
        "stage", [(dynamic, DynamicConfig), (prepare, PrepareConfig), (prepare_qat, PrepareQatConfig)]
    )
    def test_a_name_without_a_match(self, trained, ctx, stage) -> None:
        with pytest.raises(StageError, match="'Linaer'; did you mean 'Linear'"):
            stage[0](stage[1](backend=FIRST, skip=("Linaer",)), ctx, trained)

    def test_everything(self, trained, ctx) -> None:
        with pytest.raises(StageError, match=r"no layer of this network can be quantized \(skip: \*\)"):
            prepare(PrepareConfig(backend=FIRST, skip=("*",)), ctx, trained)


class TestRefusals:
    def test_convert_needs_ranges(self, trained, ctx) -> None:
        for prepared in (
            prepare(PrepareConfig(backend=FIRST), ctx, trained),
            prepare_qat(PrepareQatConfig(backend=FIRST), ctx, trained),
        ):
            with pytest.raises(
                StageError, match=r"observers saw no data .* run quant.calibrate after quant.prepare, or train"
            ):
                convert(ConvertConfig(), ctx, prepared)

    def test_convert_needs_a_prepared_model(self, trained, variants, ctx) -> None:
        with pytest.raises(StageError, match="got a model that is float"):
            convert(ConvertConfig(), ctx, trained)
        for model in variants(FIRST).values():
            with pytest.raises(StageError, match="got a model that is already int8"):
                convert(ConvertConfig(), ctx, model)

    def test_calibrate_needs_observers(self, trained, digits, ctx) -> None:
        with pytest.raises(StageError, match="needs a model with observers"):
            calibrate(CalibrateConfig(), ctx, trained, digits)

    def test_calibrate_needs_samples(self, trained, digits, ctx) -> None:
        prepared = prepare(PrepareConfig(backend=FIRST), ctx, trained)
        with pytest.raises(StageError, match="val has 0 samples"):
            calibrate(CalibrateConfig(split="val"), ctx, prepared, digits)

    @pytest.mark.parametrize(
        "stage", [(dynamic, DynamicConfig), (prepare, PrepareConfig), (prepare_qat, PrepareQatConfig)]
    )
    def test_only_float_models_are_prepared(self, trained, variants, ctx, stage) -> None:
        config = stage[1](backend=FIRST)
        with pytest.raises(StageError, match=f"already int8 for {FIRST}"):
            stage[0](config, ctx, variants(FIRST)["static-per_tensor"])
        with pytest.raises(StageError, match=f"already prepared for {FIRST}"):
            stage[0](config, ctx, prepare(PrepareConfig(backend=FIRST), ctx, trained))

    def test_nothing_to_quantize(self, ctx) -> None:
        model = make_model(nothing_to_quantize)
        with pytest.raises(StageError, match="no layer of this network can be quantized"):
            dynamic(DynamicConfig(backend=FIRST), ctx, model)
        with pytest.raises(StageError, match="no layer of this network can be quantized"):
            prepared = prepare(PrepareConfig(backend=FIRST), ctx, model)
            convert(ConvertConfig(), ctx, calibrate(CalibrateConfig(), ctx, prepared, make_digits_of_two()).model)

    def test_weights_that_are_not_numbers(self, trained, digits, ctx) -> None:
        broken = dict(trained.tensors) | {"0.weight": torch.full_like(trained.tensors["0.weight"], float("nan"))}
        prepared = prepare(PrepareConfig(backend=FIRST, observer="min_max"), ctx, Model(trained.recipe, broken))
        with pytest.raises(StageError, match="is not finite"):
            calibrate(CalibrateConfig(), ctx, prepared, digits)

    def test_a_backend_that_is_not_there(self, variants, trained, digits, ctx, monkeypatch) -> None:
        model = variants(FIRST)["static-per_tensor"]
        ready = calibrate(CalibrateConfig(), ctx, prepare(PrepareConfig(backend=FIRST), ctx, trained), digits).model
        monkeypatch.setattr(type(torch.backends.quantized), "supported_engines", ["none"])
        for attempt in (
            lambda: prepare(PrepareConfig(backend=FIRST), ctx, trained),
            lambda: convert(ConvertConfig(), ctx, ready),
            model.build,
            lambda: logits_of(model, digits),
        ):
            with pytest.raises(StageError, match=f"does not support int8 backend {FIRST}"):
                attempt()


def make_digits_of_two() -> Data:
    from .conftest import make_digits

    data = make_digits()
    return Data(data.info, {"calibration": data.splits["calibration"].subset(np.arange(2))}, data.loader)


def test_a_network_of_convolutions_is_stored_as_int8_by_dynamic(ctx, digits, metrics) -> None:
    model = make_model(convolution_only)
    small = dynamic(DynamicConfig(backend=FIRST), ctx, model)
    assert metrics()["int8_layers"] == 0
    assert small.size_bytes < 0.6 * model.size_bytes  # 640 weights: names and scales weigh as much
    assert np.abs(logits_of(small, digits) - logits_of(model, digits)).max() < 0.05
    with pytest.raises(StageError, match="no layer"):
        dynamic(DynamicConfig(backend=FIRST, convolutions="float"), ctx, model)


def test_dynamic_convolutions_compute_with_the_weights_that_are_stored(trained, digits, ctx) -> None:
    model = dynamic(DynamicConfig(backend=FIRST, skip=("Linear",)), ctx, trained)
    rounded = Model(replace(trained.recipe), model.tensors)
    # Not bit-equal: a float model is evaluated channels last.
    assert np.abs(logits_of(model, digits) - logits_of(rounded, digits)).max() < 1e-4
    assert np.abs(logits_of(trained, digits) - logits_of(rounded, digits)).max() > 1e-2


def test_calibrating_a_model_for_training_gives_it_ranges(trained, digits, ctx) -> None:
    prepared = prepare_qat(PrepareQatConfig(backend=FIRST), ctx, trained)
    calibrated, ranges = calibrate(CalibrateConfig(), ctx, prepared, digits)
    assert len(ranges.limits) == 5
    model = convert(ConvertConfig(), ctx, calibrated)
    assert accuracy(logits_of(model, digits), digits) > accuracy(logits_of(trained, digits), digits) - 0.015
    flags = {name: value.item() for name, value in calibrated.tensors.items() if name.endswith("fake_quant_enabled")}
    assert set(flags.values()) == {1}


def test_evaluating_between_trainings_changes_nothing(trained, digits, ctx) -> None:
    model = train(prepare_qat(PrepareQatConfig(backend=FIRST), ctx, trained), digits, lr=0.001)
    module = model.build_prepared()
    with torch.no_grad():
        module(torch.randn(8, 1, 8, 8) * 100)
    for name, value in module.state_dict().items():
        # What fake-quantizes weights follows the weights, which the last step has moved.
        assert torch.equal(value, model.tensors[name]) or "weight_fake_quant" in name


@pytest.mark.sampled(2)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_converted_model_gives_the_graph_that_exporters_know(variants, digits, backend) -> None:
    from torch.ao.quantization.quantize_fx import _convert_to_reference_decomposed_fx

    for name, model in variants(backend).items():
        if "dynamic" in name:
            assert model.recipe.prepare == ()
            continue
        prepared = model.build_prepared()
        assert prepared.meta["_observed_graph_module_attrs"]
        reference = _convert_to_reference_decomposed_fx(prepared)
        # Beyond the calibrated range, torch's reference clamps to reduced ranges, and int8 operators don't.
        x = next(iter(digits.batches("calibration", batch_size=4))).inputs["images"]
        with torch.no_grad(), model.predictor() as predict:
            difference = np.abs(logits_from(predict, x.numpy()) - reference(x).numpy())
        step = [
            value.item() for key, value in model.int8_tensors.items() if key.endswith("scale") and "input" not in key
        ][-1]
        assert difference.max() <= 1.5 * step, name


def test_results_are_reproducible(trained, digits, ctx) -> None:
    one, other = (int8("static", trained, digits, ctx, backend=FIRST) for _ in range(2))
    assert one.recipe == other.recipe
    assert all(torch.equal(tensor, other.int8_tensors[name]) for name, tensor in one.int8_tensors.items())


@pytest.fixture(autouse=True)
def engine_and_threads_stay() -> Iterator[None]:
    before = torch.backends.quantized.engine, torch.get_num_threads()
    yield
    assert (torch.backends.quantized.engine, torch.get_num_threads()) == before


def test_progress_is_reported(trained, digits, ctx, events) -> None:
    prepared = prepare(PrepareConfig(backend=FIRST), ctx, trained)
    convert(ConvertConfig(), ctx, calibrate(CalibrateConfig(num_samples=100), ctx, prepared, digits).model)
    found = [event for event in events if isinstance(event, Progress)]
    assert [(event.done, event.total) for event in found if event.total] == [(64, 100), (100, 100)]
    doing = ["tracing the network", "comparing its outputs", "converting the layers", "comparing the layers"]
    assert [event.facts["doing"] for event in found if not event.total] == doing
