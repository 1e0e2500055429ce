"""Applying a prepare transform to a network; what can't be traced, run or computed rightly in int8 stays float.

Whatever conversion would refuse later is found here: before training or calibration is paid for.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn
from torch.fx import GraphModule

from ptpipe import JSON, Context, PtpipeError, StageError
from ptpipe_quant import transforms
from ptpipe_quant.config import BackendConfig, PrepareQatConfig, TracedConfig
from ptpipe_quant.cpu import wants_reduced_range
from ptpipe_quant.dry_run import NoInt8LayerError, UnsupportedOperatorsError, dry_run
from ptpipe_quant.functional_weights import belongs_to
from ptpipe_quant.gradient_parity import check_gradients
from ptpipe_quant.int8_parity import MAX_STEPS
from ptpipe_quant.prepared_parity import Expected, Inputs, check_prepared, draws_in_training, with_frozen
from ptpipe_quant.trace import UntraceableError, float_names, functional_transposed, layers_to_quantize
from ptpipe_torch import FunctionRef, Model
from ptpipe_torch.errors import first_line
from ptpipe_torch.int8.engine import quantized_engine, transposed_convolution_error
from ptpipe_torch.int8.fx import is_prepared
from ptpipe_torch.int8.layer_parity import LayerDifference
from ptpipe_torch.int8.transposed import computed_form
from ptpipe_torch.runtime import large_blocks_mapped, released_memory

_LOST_NOISE = (
    "training will be without noise: the model draws random numbers in train mode, and its graph does not. A line "
    "behind `if self.training:` is not traced, but a layer of its own that returns its input in eval mode is kept"
)

_RECURRENT = "torch has int8 kernels for recurrent layers in quant.dynamic alone"


@large_blocks_mapped()
def prepare_model(
    config: TracedConfig,
    ctx: Context,
    model: Model,
    transform: FunctionRef,
    *,
    train: bool = False,
    may_be_idle: bool = False,
) -> Model:
    """Apply a prepare transform, and prove that nothing but rounding changes the network.

    `train`: in train mode too. `may_be_idle`: whether patterns of `layers` may decide nothing.
    """
    with quantized_engine(config.engine), released_memory(), torch.random.fork_rng(devices=[]), torch.no_grad():
        network = model.build()
        recurrent = layers_to_quantize(network, config.skip, nn.LSTM, nn.GRU, nn.RNN)
        expected = Expected.of(network, model.signature, train=train)
        is_random = isinstance(config, PrepareQatConfig) and draws_in_training(network, expected.inputs)
        del network  # what it keeps of a call, such as positions, would become part of its graph: a new one is traced
        ctx.progress(1, None, "step", doing="tracing the network")
        transform, module = _Preparation(config, ctx, model, expected).apply(transform)
        _report_layers(module, recurrent, ctx, may_be_idle=may_be_idle)
        computed = module.meta[transforms.COMPUTED] if isinstance(config, PrepareQatConfig) else ()
        if computed:
            ctx.notice(trained_directly(computed, "in the forward pass"))
        masked = _masked_weights(module, computed, ctx)
        folded = module.meta[transforms.FOLDED]
        for name in folded:
            ctx.log(f"{name} is folded into the transposed convolution in front of it: it is trained as part of it")
        ctx.progress(2, None, "step", doing="comparing its outputs")
        check_prepared(ctx, module, expected, model.build, folded)
        if isinstance(config, PrepareQatConfig):
            ctx.progress(3, None, "step", doing="comparing its gradients")
            build, is_train = functools.partial(with_frozen, model.build, folded), expected.train_outputs is not None
            check_gradients(ctx, module, expected.inputs, build, train=is_train, route=config.route)
        if is_random and not draws_in_training(module, expected.inputs):
            ctx.notice(_LOST_NOISE)
        ctx.metric(backend=config.engine, weights=transform.arguments["weights"])
        recipe = replace(model.recipe, prepare=(transform,), backend=config.engine)
        return Model.from_module(recipe.with_pruned(masked), module)


def for_conversion(transform: FunctionRef) -> FunctionRef:
    """Return the same transform, set to return the graph that FX converts and exporters take."""
    standard = {"calibrating": False, "freeze_at": None}
    arguments = {name: standard.get(name, value) for name, value in transform.arguments.items()}
    return FunctionRef(transform.address, arguments)


@dataclass
class _Preparation:
    """Applies a transform as often as it takes to know what stays float."""

    config: TracedConfig
    ctx: Context
    model: Model
    expected: Expected
    layers: dict[str, str] = field(default_factory=dict)
    """Those that can't be traced, and why."""
    operators: dict[str, str] = field(default_factory=dict)
    """Those that the engine can't run or gets wrong, by their names in the graph, and a sentence on each."""

    def apply(self, transform: FunctionRef) -> tuple[FunctionRef, GraphModule]:
        """Return the transform with what stays float, and what it makes of the float network."""
        first: StageError | None = None
        while True:
            try:
                complete, module, unsupported = self._attempt(transform)
                break
            except (UntraceableError, UnsupportedOperatorsError) as error:
                if not self._keep_float(error):
                    raise
                first = first or error
            except NoInt8LayerError as error:  # because of what was kept float before
                raise first or error from None
        if not is_prepared(module):
            skipped = f" (skip: {', '.join(self.config.skip)})" if self.config.skip else ""
            reasons = [f"; {name} stays float: {why}" for name, why in module.meta[transforms.KEPT_FLOAT].items()]
            message = f"{self.ctx.kind}: no layer of this network can be quantized{skipped}"
            raise first or StageError("".join((message, *reasons[:3])))
        self._report(unsupported)
        return complete, module

    def _keep_float(self, error: UntraceableError | UnsupportedOperatorsError) -> bool:
        """Keep float what an attempt stopped at; return whether there is such a thing, and it was not float before."""
        layers = {error.layer: error.reason} if isinstance(error, UntraceableError) and error.layer else {}
        operators = error.reasons if isinstance(error, UnsupportedOperatorsError) else {}
        if self.layers.keys() >= layers.keys() and self.operators.keys() >= operators.keys():
            return False
        self.layers |= layers
        self.operators |= operators
        return True

    def _attempt(self, transform: FunctionRef) -> tuple[FunctionRef, GraphModule, list[str]]:
        """Return also the transposed convolutions that the engine gets wrong."""
        network = self.model.build()
        unsupported = self._wrong_transposed(network)
        skip = [*self.config.skip, *self.layers, *unsupported]
        kept_float: dict[str, JSON] = {"skip": list[JSON](skip), "float_operators": list[JSON](self.operators)}
        complete = FunctionRef(transform.address, {**transform.arguments, **kept_float})
        with released_memory():  # of what folding has copied
            module = _applied(complete, network, self.ctx.kind)
            del network
        if is_prepared(module):
            with released_memory():  # of the networks of the trial
                self._try_conversion(complete, self.expected.inputs)
        return complete, module, unsupported

    def _try_conversion(self, transform: FunctionRef, inputs: Inputs) -> None:
        with released_memory():
            trial = _applied(for_conversion(transform), self.model.build(), self.ctx.kind)
        wrong = dry_run(self.ctx, trial, inputs, self.config.engine)
        if wrong and not _saturates_by_choice(transform, self.config):
            backend = self.config.engine
            raise UnsupportedOperatorsError(
                f"{self.ctx.kind}: {backend} computes {wrong[0].layer} wrongly: {_fault(wrong[0])}. "
                "Choose another backend",
                reasons={
                    layer.operator: f"{layer.layer} stays float: {backend} computes it wrongly: {_fault(layer)}"
                    for layer in wrong
                },
            )

    def _wrong_transposed(self, network: nn.Module) -> list[str]:
        inputs, route, backend = self.model.signature.inputs, self.config.route, self.config.engine
        skipped = float_names(network, [*self.config.skip, *self.layers])
        layers = dict(network.named_modules()) | functional_transposed(network, inputs, skipped, route)
        return [
            name
            for name, layer in layers.items()
            if isinstance(layer, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d)
            and not belongs_to(name, skipped)
            and transposed_convolution_error(computed_form(layer, backend), backend) > MAX_STEPS
        ]

    def _report(self, unsupported: Sequence[str]) -> None:
        reasons: dict[str, list[str]] = {}
        for layer, reason in self.layers.items():
            reasons.setdefault(reason, []).append(layer)
        for reason, names in reasons.items():
            self.ctx.notice(f"{_stay_float(names)}: {reason}")
        for sentence in dict.fromkeys(self.operators.values()):  # one may be on several
            self.ctx.notice(sentence)
        if unsupported:
            self.ctx.notice(
                f"{_stay_float(unsupported)}: {self.config.engine}'s transposed convolution computes another "
                "function here, or loses the weights"
            )
            self.ctx.metric(kept_float=truncated(unsupported))


def _fault(layer: LayerDifference) -> str:
    return f"its output is up to {layer.max_steps:.0f} steps from what its inputs say, where 1 is rounding"


def _stay_float(names: Sequence[str]) -> str:
    return f"{', '.join(map(str, truncated(names, 5)))} {'stays' if len(names) == 1 else 'stay'} float"


def _with_reasons(kept_float: Mapping[str, str]) -> str:
    """Return how many layers stay float, and the first ones with their reasons. `kept_float`: the reason of each."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in kept_float.items():
        by_reason.setdefault(reason, []).append(name)
    shown = [f"{', '.join(map(str, truncated(names, 3)))}: {reason}" for reason, names in by_reason.items()]
    more = f"; {len(shown) - 3} more in the run's log" if len(shown) > 3 else ""
    number = "1 layer stays" if len(kept_float) == 1 else f"{len(kept_float)} layers stay"
    return f"{number} float ({'; '.join(shown[:3])}{more})"


def _report_layers(prepared: GraphModule, recurrent: Iterable[str], ctx: Context, *, may_be_idle: bool) -> None:
    """Report what stays float, and what options by layer reach. Raises StageError for a pattern that decides nothing.

    `recurrent`: layers that would be quantized if there were kernels.
    """
    if prepared.meta[transforms.IDLE] and not may_be_idle:
        raise StageError(prepared.meta[transforms.IDLE][0])
    kept_float = dict.fromkeys(recurrent, _RECURRENT) | prepared.meta[transforms.KEPT_FLOAT]
    for name, reason in kept_float.items():
        ctx.log(f"{name} stays float: {reason}")
    if kept_float:
        ctx.notice(_with_reasons(kept_float))
    for name, others in prepared.meta[transforms.MERGED].items():
        ctx.log(f"{name} is one convolution with {', '.join(others)}: their outputs are added")
    if num_left := prepared.meta[transforms.NUM_SUMS]:
        ctx.notice(
            f"{num_left} {'sum' if num_left == 1 else 'sums'} of parallel branches will be computed as such in int8; "
            "quant.prepare_qat with batch_norm: fold makes one convolution of each, which takes less time and space"
        )
    for pattern, names in prepared.meta[transforms.REACHED].items():
        ctx.log(f"layers: {pattern!r} decides {', '.join(names) or 'operators without weights'}")


def _saturates_by_choice(transform: FunctionRef, config: BackendConfig) -> bool:
    """Return whether sums may saturate since the user wants 8-bit weights: `quant.convert` has the real ranges."""
    return wants_reduced_range(config.engine)[0] and not transform.arguments["narrow_weights"]


def _applied(transform: FunctionRef, network: nn.Module, kind: str) -> GraphModule:
    try:
        prepared = transform.resolve("transform")(network, **transform.arguments)
    except PtpipeError:
        raise
    except Exception as error:  # torch's own passes raise anything
        raise StageError(f"{kind}: torch can't prepare this network for int8: {first_line(error)}") from error
    assert isinstance(prepared, GraphModule), type(prepared)
    return prepared


def _masked_weights(prepared: GraphModule, computed: Iterable[str], ctx: Context) -> list[str]:
    """Return the weights that were computed and have zeros, as masked ones do; training must not fill them."""
    parameters, found = dict(prepared.named_parameters()), []
    for computed_name in computed:
        name = computed_name if computed_name in parameters else f"{computed_name}.weight"
        weight = parameters.get(name)
        if weight is not None and weight.dim() > 1 and 0 < weight.count_nonzero() < weight.numel():
            ctx.log(f"{computed_name} has zeros, as a masked weight does: training keeps them")
            found.append(name)
    return found


def trained_directly(names: Sequence[str], how: str) -> str:
    """Return a notice for weights that were computed from other parameters."""
    return (
        f"the weights of {', '.join(map(str, truncated(names, 5)))} are computed from other parameters ({how}); from "
        "here on they are parameters of their own, which training changes directly"
    )


def truncated(names: Iterable[str], limit: int = 20) -> list[JSON]:
    """Return the first names, and how many more there are."""
    shown = list[JSON](names)
    return shown if len(shown) <= limit else [*shown[:limit], f"and {len(shown) - limit} more"]
