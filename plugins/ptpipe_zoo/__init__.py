"""Networks to train: MLP, small CNN and U-Net, text transformer and LSTM, torchvision's, one's own (model.*)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from ptpipe import JSON, Context, Plan, Problem, Stage, StageError, hookimpl, nearest, stage
from ptpipe_torch import Data, FunctionRef, Model, OnnxFile
from ptpipe_torch.files import emptied_on_error, file_digest
from ptpipe_torch.model.onnx_bytes import is_self_contained
from ptpipe_zoo import extras, names, published, torch_folder
from ptpipe_zoo.config import (
    DynamicShapesConfig,
    MlpConfig,
    OnnxModelConfig,
    PythonModelConfig,
    SmallCnnConfig,
    SmallUNetConfig,
    TextLstmConfig,
    TextTransformerConfig,
    TimmConfig,
    TorchModelConfig,
    TorchvisionConfig,
    TransformersConfig,
)

FileConfig: TypeAlias = PythonModelConfig | TimmConfig | TorchvisionConfig
"""Options with a `weights_file`."""


@stage("model.mlp", packages=("torch",))
def mlp(config: MlpConfig, ctx: Context, data: Data) -> Model:
    """Build a multi-layer perceptron: linear layers with ReLU (and dropout) on the flattened image or a table's row.

    Sizes are the data set's: an embedding for each categorical column, an output for each class or target. Outputs of
    a regression are rescaled to the units of the targets. The initial weights depend on the seed alone.
    """
    from ptpipe_zoo import nets

    builder_ref = nets.mlp_ref(config, data.info)
    return nets.make_model(builder_ref, nets.build_seeded(builder_ref, ctx.seed), data.info, ctx)


@stage("model.small_cnn", packages=("torch",))
def small_cnn(config: SmallCnnConfig, ctx: Context, data: Data) -> Model:
    """Build a small convolutional network for small images (8x8 to 64x64).

    Two 3x3 convolutions of `width` and 2 x `width` channels, each with batch norm, ReLU and 2x2 max pooling; a
    linear layer of 128 with ReLU; a linear layer of the data set's classes. Outputs of a regression are rescaled to the
    units of the targets. The initial weights depend on the seed alone.
    """
    from ptpipe_zoo import nets

    info = data.info
    shape_CHW, num_classes = nets.image_classifier_sizes("model.small_cnn", info)
    sizes = {"shape_CHW": shape_CHW, "num_classes": num_classes, "width": config.width}
    builder_ref = FunctionRef.to(nets.small_cnn, **sizes, **nets.rescaling(info))
    return nets.make_model(builder_ref, nets.build_seeded(builder_ref, ctx.seed), info, ctx)


@stage("model.small_unet", packages=("torch",))
def small_unet(config: SmallUNetConfig, ctx: Context, data: Data) -> Model:
    """Build a small U-Net that returns classes or numbers for each pixel, of operators that all have int8 kernels.

    The first convolution halves the image; `width` channels there, twice as many after each of `depth` poolings. The
    initial weights depend on the seed alone.
    """
    from ptpipe_zoo import nets, unet

    shape_CHW, num_classes = unet.segmenter_sizes("model.small_unet", data.info)
    builder_ref = FunctionRef.to(
        unet.small_unet,
        shape_CHW=shape_CHW,
        num_classes=num_classes,
        width=config.width,
        depth=config.depth,
        **nets.rescaling(data.info),
    )
    return nets.make_model(builder_ref, nets.build_seeded(builder_ref, ctx.seed), data.info, ctx)


@stage("model.text_transformer", packages=("torch",))
def text_transformer(config: TextTransformerConfig, ctx: Context, data: Data) -> Model:
    """Build a transformer encoder for texts: token and position embeddings, pre-norm layers, pooling, a linear layer.

    Sizes are the data set's. Attention is masked where a batch is padded, so that a text has the same outputs in any
    batch. For a task on tokens the last layer is applied to each token. Activations are ReLU: in int8 it is part of the
    linear layer before it, while GELU would be a float operator between two int8 layers. The initial weights depend on
    the seed alone.
    """
    from ptpipe_zoo import nets, text_nets

    builder_ref = text_nets.transformer_ref(config, data.info)
    if not config.causal and text_nets.TextSizes.of(ctx.kind, data.info).is_language_model:
        ctx.notice("each token sees the ones behind it, which it is to predict: set causal: true for a language model")
    return nets.make_model(builder_ref, nets.build_seeded(builder_ref, ctx.seed), data.info, ctx)


@stage("model.text_lstm", packages=("torch",))
def text_lstm(config: TextLstmConfig, ctx: Context, data: Data) -> Model:
    """Build an LSTM for texts: token embeddings, LSTM layers from left to right, pooling, a linear layer.

    Sizes are the data set's. Not bidirectional: backwards it would begin with a text's padding, whose length depends on
    the batch. For a task on tokens the last layer is applied to each token. The initial weights depend on the seed
    alone.
    """
    from ptpipe_zoo import nets, text_nets

    builder_ref = text_nets.lstm_ref(config, data.info)
    return nets.make_model(builder_ref, nets.build_seeded(builder_ref, ctx.seed), data.info, ctx)


def _weights_path(config: FileConfig) -> Path | None:
    return Path(config.weights_file).expanduser() if config.weights_file else None


def _fingerprint(config: TorchvisionConfig) -> JSON:
    """Return the SHA-256 of the weights' file by name; None without one.

    The published name alone for a file that is not there: the preflight downloads it, or reports what is missing.
    """
    if config.weights:
        url = names.weight_urls(config.name).get(config.weights)
        path = published.cached_file(url) if url else None
        return {path.name: file_digest(path) if path.is_file() else None} if path else None
    return _weights_digest(config)


def _weights_digest(config: FileConfig) -> JSON:
    path = _weights_path(config)
    return file_digest(path) if path is not None and path.is_file() else None


def _missing_weights_file(config: FileConfig) -> Iterable[str]:
    path = _weights_path(config)
    if path is not None and not path.is_file():
        yield f"weights file {path} does not exist"


def _preflight(config: TorchvisionConfig) -> Iterable[str]:
    """Yield a line for each reason why the network can't be built here."""
    yield from _missing_weights_file(config)
    try:
        from ptpipe_zoo import torchvision_models, torchvision_segmentation
    except (ImportError, RuntimeError) as error:
        yield f"torchvision can't be imported: {error}"
        return
    known = [*torchvision_models.list_classifiers(), *torchvision_segmentation.list_segmenters()]
    if config.name not in known:
        yield f"the installed torchvision has no network {config.name!r}{_hint(config.name, known)}"
    elif config.weights:
        yield from _missing_weights(config.name, config.weights, torchvision_models.weight_urls(config.name))


def _missing_weights(name: str, weights: str, urls: Mapping[str, str]) -> Iterable[str]:
    """Download published weights; yield a line if that fails, or if they are not the published ones.

    `urls`: as torchvision has them.
    """
    if weights not in urls:
        yield f"{name} has no published weights {weights!r}; available: {', '.join(urls)}"
    elif names.weight_urls(name).get(weights) != urls[weights]:
        yield f"can't read from torchvision's source which file {weights} of {name} is: download it, use weights_file"
    else:
        try:
            published.fetch(urls[weights])
        except StageError as error:
            yield str(error)


def _hint(word: str, words: Iterable[str]) -> str:
    suggestion = nearest(word, words)
    return f" (did you mean {suggestion!r}?)" if suggestion else ""


@stage("model.torchvision", packages=("torch", "torchvision"), fingerprint=_fingerprint, preflight=_preflight)
def torchvision(config: TorchvisionConfig, ctx: Context, data: Data) -> Model:
    """Build one of torchvision's networks for classification or segmentation, for the data set's images and classes.

    The weights are random, as a function of the seed alone; or from a local file; or published weights, downloaded
    once into torch's hub cache, before the first stage, and verified by the digest in their name. Pretrained weights
    for RGB are adapted to other numbers of channels, and a last layer for other classes is reinitialized; a notice
    reports either. The data set's own mean and standard deviation normalize the images, even where the published
    weights were trained with ImageNet's. Auxiliary classifiers are left out.
    """
    from ptpipe_zoo import nets, torchvision_models, torchvision_networks, weights

    network = torchvision_networks.build(config, ctx.seed, data.info)
    path = _weights_path(config)
    if config.weights:
        url = torchvision_models.weight_urls(config.name)[config.weights]
        path = published.cached_file(url)
        if not path.is_file():
            raise StageError(f"{path} was not found: a run downloads it before its first stage")
        published.verify(path, url)
    builder_ref, module, inner = network.builder_ref, network.module, nets.unscaled(network.module)
    if path is not None:
        state, layers = weights.read_weights(path, ctx.notice, config.weights_entry), (network.stems, network.heads)
        units = weights.units_of(state, inner, network.heads, str(path))
        builder_ref, module = nets.with_units(builder_ref, module, units)
        for notice in weights.load_weights(inner, state, *layers, source=str(path)):
            ctx.notice(notice)
    return nets.make_model(builder_ref, module, data.info, ctx)


def _timm_fingerprint(config: TimmConfig) -> JSON:
    if not config.weights:
        return _weights_digest(config)
    from ptpipe_zoo import hub

    repository = f"timm/{config.name}.{config.weights}"
    path = None if extras.missing_extra("timm") else hub.cached_file(repository)
    return {repository: file_digest(path) if path is not None else None}


def _timm_preflight(config: TimmConfig) -> Iterable[str]:
    from ptpipe_zoo import timm_models

    yield from _missing_weights_file(config)
    yield from timm_models.problems(config)


@stage("model.timm", packages=("torch", "timm"), fingerprint=_timm_fingerprint, preflight=_timm_preflight)
def timm(config: TimmConfig, ctx: Context, data: Data) -> Model:
    """Build one of timm's networks for the data set's channels, image size and classes. Needs `ptpipe[timm]`.

    The weights are random, as a function of the seed alone; or from a local file; or published weights of the Hugging
    Face Hub's `timm/NAME.WEIGHTS`, downloaded once into its cache, before the first stage. Pretrained weights for RGB
    are adapted to other numbers of channels, and a last layer for other classes is reinitialized; a notice reports
    either. The data set's own mean and standard deviation normalize the images.
    """
    from ptpipe_zoo import timm_models

    return timm_models.build_model(config, ctx, data)


def _transformers_fingerprint(config: TransformersConfig) -> JSON:
    from ptpipe_zoo import hf_folder

    return hf_folder.digests(Path(config.folder).expanduser()) if config.folder else None


def _transformers_preflight(config: TransformersConfig) -> Iterable[str]:
    from ptpipe_zoo import hf_folder

    if config.folder and (reason := hf_folder.missing(Path(config.folder).expanduser())):
        yield reason


@stage(
    "model.transformers",
    packages=("torch", "transformers"),
    fingerprint=_transformers_fingerprint,
    preflight=_transformers_preflight,
)
def transformers(config: TransformersConfig, ctx: Context, data: Data) -> Model:
    """Build a network of Hugging Face's library transformers for texts or images. Needs `ptpipe[transformers]`.

    From a configuration, with random weights that depend on the seed alone, or from a local folder with safetensors
    files. Nothing is downloaded, and no code of a folder is run. The data set's task chooses what the network returns:
    a number for each class of a text, of each token, or of an image, or for each token of the vocabulary. A folder's
    network must have the tokenizer that data.text has. Attention is the one that can be exported ("eager").
    """
    from ptpipe_zoo import transformers_models

    return transformers_models.build_model(config, ctx, data)


def _python_digests(config: PythonModelConfig) -> JSON:
    from ptpipe_torch.paths import read_digests

    weights, read = _weights_digest(config), read_digests(config.reads)
    return weights if read is None else {"weights_file": weights, "reads": read}


def _python_function(config: PythonModelConfig) -> Iterable[str]:
    return [f"{config.file}:{config.function}"]


@stage(
    "model.python",
    packages=("torch",),
    fingerprint=_python_digests,
    preflight=_missing_weights_file,
    source_functions=_python_function,
)
def python_model(config: PythonModelConfig, ctx: Context, data: Data) -> Model:
    """Build a network of your own: what a function in a Python file returns, or a class in it is.

    The file needs to know nothing of ptpipe; code under `if __name__ == "__main__":` does not run. The network gets the
    data set's input columns, in order, and returns one tensor, several in order, or a dict by name. It is called
    on two samples and on one, to see that its outputs fit. Random initial weights depend on the seed alone. The result
    is invalidated by any change of the file's code, or of what it imports from its own folder; comments don't count. So
    it is by a change of a file that the function opens in Python, as `torch.load` and `from_pretrained` do.
    """
    from ptpipe_zoo import python_file

    return python_file.build_model(config, ctx, data)


def _onnx_digests(config: OnnxModelConfig) -> JSON:
    """Return the SHA-256 of the file, and of the tensors that it keeps in other files."""
    path = Path(config.file).expanduser()
    try:
        digest = file_digest(path)
        if is_self_contained(path):
            return digest
    except OSError as error:
        raise StageError(f"can't read {path.absolute()}: {error.strerror or error}") from error
    except ValueError:  # no ONNX file: the stage says so
        return digest
    from ptpipe_zoo import onnx_external_data

    return {"file": digest, "external_data": onnx_external_data.digest(path)}


@stage("model.onnx", packages=("onnx", "onnxruntime"), fingerprint=_onnx_digests)
def onnx_model(config: OnnxModelConfig, ctx: Context, data: Data) -> OnnxFile:
    """Take an ONNX file as it is, one that is deployed for example: for comparisons and gates beside your own.

    Its inputs and outputs must fit the data set's, and get their names; further outputs are left out. All have the
    batch on their first axis: real samples are run alone and together, and must have the same outputs. The file gets
    the data set's inputs: where it expects pixels normalized in another way, let the data stage normalize them so.
    Integers are cast where the file takes int32 and the data set has int64, or the other way round.
    Tensors in other files of its folder (external data) are put into it. One that was exported for a single batch size
    predicts others in pieces of that size.
    """
    from ptpipe_zoo import onnx_file

    with emptied_on_error(ctx.scratch):
        return onnx_file.load_file(config, ctx, data)


@stage("model.dynamic_shapes", packages=("torch",))
def dynamic_shapes(config: DynamicShapesConfig, ctx: Context, model: Model) -> Model:
    """Let axes of a network's inputs have any size, such as height and width: exported files then take every picture.

    The same network with the same weights, for convolutional networks that classify, segment or restore pictures. Data
    sets keep their one size: it is trained, calibrated and compared with that, and `export.onnx` also compares the file
    at other sizes. An axis has a name; `32*height` is a multiple of 32, as networks need that halve their input five
    times and double it again. The network is called at a few sizes, to see that it takes them and what it returns.
    Stands before the stage that prepares or quantizes it: quantization records the network's operators for any size.
    """
    from ptpipe_zoo.open_axes import with_dynamic_shapes

    return with_dynamic_shapes(config, ctx, model)


@stage(
    "model.torch",
    packages=("torch",),
    fingerprint=torch_folder.digests,
    source_functions=lambda config: config.functions,
)
def torch_model(config: TorchModelConfig, ctx: Context) -> Model:
    """Take a torch model that a run delivered, float or int8, as it is: for comparisons and gates beside your own.

    The folder is one that `ptpipe get` wrote, or that is in the artifacts folder. Plugins with the network's code are
    named under `plugins:`, functions in Python files under `functions`.
    """
    return torch_folder.load_folder(config)


@hookimpl
def ptpipe_stages() -> Iterable[Stage[..., Any]]:
    """Return the stages of this plugin."""
    return [
        mlp,
        small_cnn,
        small_unet,
        text_lstm,
        text_transformer,
        torchvision,
        timm,
        transformers,
        python_model,
        onnx_model,
        dynamic_shapes,
        torch_model,
    ]


@hookimpl
def ptpipe_check(plan: Plan) -> Iterable[Problem]:
    """Find libraries that are not installed, functions that options name and files don't have, and their arguments."""
    from ptpipe_torch.python_signature import function_problems

    problems: list[Problem] = []
    for entry in plan.stages:
        library = entry.kind.removeprefix("model.")
        if entry.kind in (timm.kind, transformers.kind) and (reason := extras.missing_extra(library)):
            problems.append(plan.problem(entry.id, reason))
        if entry.kind == python_model.kind:
            problems += function_problems(plan, entry.id)
    return problems
