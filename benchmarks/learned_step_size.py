"""int8 accuracy on MNIST with `learned_step_size` and without, of small_cnn and of the same network with an outlier.

The outlier is planted: one of the hidden units is multiplied by a factor, and what reads it is divided by that, so that
the float network computes the same. Each is trained on the first 10,000 images, then prepared, trained for one epoch
and converted; `--rate` multiplies the learning rate of the learned ranges. A line is a backend and a network.

    python benchmarks/learned_step_size.py [--backends fbgemm qnnpack] [--factors 1 64 256] [--optimizer adamw]
        [--lr 0.001] [--rate 30] [--weights auto] [--seed 0]
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ptpipe import Context
from ptpipe_data import MnistConfig, load_mnist
from ptpipe_quant import ConvertConfig, PrepareQatConfig, convert, prepare_qat
from ptpipe_torch import Data, Model
from ptpipe_train import TrainConfig, train
from ptpipe_zoo import SmallCnnConfig, small_cnn

NUM_IMAGES, BATCH_SIZE, FLOAT_EPOCHS, FLOAT_LR = 10_000, 128, 3, 0.05


@dataclass(frozen=True)
class Bench:
    """One seed."""

    folder: Path
    data: Data
    options: argparse.Namespace

    def context(self) -> Context:
        return Context("bench", "bench", self.options.seed, Path(tempfile.mkdtemp(dir=self.folder)))

    def train(self, model: Model, **options: object) -> Model:
        config = TrainConfig.model_validate({**options, "device": "cpu", "num_threads": 1})
        return train(config, self.context(), model, self.data)

    def float_model(self) -> Model:
        model = small_cnn(SmallCnnConfig(), self.context(), self.data)
        return self.train(model, epochs=FLOAT_EPOCHS, lr=FLOAT_LR, schedule={"name": "one_cycle"})

    def int8_percent(self, model: Model, backend: str, *, learned: bool) -> float:
        options = self.options
        config = {"backend": backend, "weights": options.weights, "learned_step_size": learned}
        prepared = prepare_qat(PrepareQatConfig.model_validate(config), self.context(), model)
        rates = {"*.log_part": options.rate} if learned else {}
        tuned = self.train(prepared, epochs=1, optimizer=options.optimizer, lr=options.lr, lr_factors=rates)
        return self.percent(convert(ConvertConfig(), self.context(), tuned))

    def percent(self, model: Model) -> float:
        """Return the percentage of the test images that the model gets right."""
        right = 0
        with model.predictor(1) as predict:
            for batch in self.data.batches("test", batch_size=500):
                logits = predict({"images": batch.inputs["images"].numpy()})["logits"]
                right += int((logits.argmax(1) == batch.targets["labels"].numpy()).sum())
        return 100 * right / len(self.data.splits["test"])


def with_outlier(model: Model, factor: float) -> Model:
    """Return the model with its first hidden unit multiplied by the factor, and the same function."""
    tensors = {name: tensor.clone() for name, tensor in model.tensors.items()}
    hidden, last = sorted((name for name, tensor in tensors.items() if tensor.dim() == 2), key=int_prefix)
    tensors[hidden][0] *= factor
    tensors[hidden.replace("weight", "bias")][0] *= factor
    tensors[last][:, 0] /= factor
    return Model(model.recipe, tensors)


def int_prefix(name: str) -> int:
    return int(name.partition(".")[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs="+", default=["fbgemm", "qnnpack"])
    parser.add_argument("--factors", nargs="+", type=float, default=[1, 64, 256])
    parser.add_argument("--optimizer", default="adamw", choices=["sgd", "adamw"])
    parser.add_argument("--lr", type=float, default=0.001)
    parser.add_argument("--rate", type=float, default=30)
    parser.add_argument("--weights", default="auto", choices=["auto", "per_channel", "per_tensor"])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        whole = load_mnist(MnistConfig(batch_size=BATCH_SIZE), Context("data", "data.mnist", 0, Path(folder)))
        splits = {"train": whole.splits["train"].subset(np.arange(NUM_IMAGES)), "test": whole.splits["test"]}
        bench = Bench(Path(folder), Data(whole.info, splits, whole.loader), options)
        model = bench.float_model()
        print(f"float {bench.percent(model):.2f} %")
        print(f"{'backend':10} {'factor':>7} {'observed':>9} {'learned':>9}")
        for backend in options.backends:
            for factor in options.factors:
                planted = with_outlier(model, factor)
                percents = [bench.int8_percent(planted, backend, learned=learned) for learned in (False, True)]
                print(f"{backend:10} {factor:7g} {percents[0]:9.2f} {percents[1]:9.2f}", flush=True)


if __name__ == "__main__":
    main()
