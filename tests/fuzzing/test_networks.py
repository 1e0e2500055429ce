"""Random networks from float to ONNX (in no mirror of one plugin: it crosses those that train, quantize and export).

Every network ends as the function that the user wrote, or is refused with a clear line before any training. 12
networks, of which a third are exported; with PTPIPE_THOROUGH=1 300, all exported; PTPIPE_NETWORKS=1000 for that many.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, note, reject, settings

from ptpipe.testing import Bench
from ptpipe_torch.runtime import torch_threads

from .networks import InvalidNetwork, Network, Step
from .paths import Refused, Scheme, Trip, drawn
from .steps import IMAGE_STEPS, TOKEN_STEPS, VECTOR_STEPS
from .writer import StepWriter

pytestmark = [pytest.mark.plugins, pytest.mark.slow]

THOROUGH = os.environ.get("PTPIPE_THOROUGH", "0") != "0"
NUM_NETWORKS = int(os.environ.get("PTPIPE_NETWORKS", "300" if THOROUGH else "12"))
SHARES = {("static",): 0.4, ("qat",): 0.36, ("dynamic", "float"): 0.24}
MIN_ACCEPTED = 0.6
"""The part of the networks that must not be refused, or the test would show little."""


@pytest.mark.parametrize("paths", SHARES, ids="-".join)
@pytest.mark.timeout(0)
def test_every_form_is_the_network_that_the_user_wrote(paths: tuple[str, ...], tmp_path: Path) -> None:
    outcomes: Counter[str] = Counter()

    @settings(
        max_examples=round(NUM_NETWORKS * SHARES[paths]),
        derandomize=True,
        phases=[Phase.generate, Phase.shrink] if THOROUGH else [Phase.generate],
        suppress_health_check=list(HealthCheck),
        database=None,
        print_blob=False,
    )
    @given(drawn(*paths, exported=True if THOROUGH else None))
    def travel(example: tuple[Network, Scheme]) -> None:
        network, scheme = example
        note(f"{scheme}\n{network}")
        try:
            Trip(network, scheme, Bench(tmp_path)).travel()
            outcomes["accepted"] += 1
        except Refused as refusal:
            assert "\n" not in str(refusal)
            outcomes[f"refused: {refusal}"] += 1
        except InvalidNetwork:
            reject()

    with torch_threads(1):
        travel()
    assert outcomes["accepted"] >= MIN_ACCEPTED * outcomes.total(), outcomes


def source_with(registry: dict[str, StepWriter], *steps: Step) -> str:
    """The source of a network with these steps where they belong."""
    first: tuple[Step, ...] = (("convolution", 1, 0), ("convolution", 1, 0), ("save", 0, 0))
    return Network(
        (2, 8, 8),
        num_classes=3,
        image_steps=(*first, *(steps if registry is IMAGE_STEPS else ())),
        neck=0,
        token_steps=(("linear", 0, 0), ("linear", 0, 0), ("save", 0, 0), *steps) if registry is TOKEN_STEPS else (),
        vector_steps=(("linear", 0, 0), ("linear", 0, 0), ("save", 0, 0), *steps) if registry is VECTOR_STEPS else (),
    ).source


@pytest.mark.parametrize("registry", [IMAGE_STEPS, TOKEN_STEPS, VECTOR_STEPS], ids=["images", "tokens", "vectors"])
def test_every_spelling_can_be_written(registry: dict[str, StepWriter]) -> None:
    """A step that is always left out would test nothing."""
    without = source_with(registry)
    for name in registry:
        numbers = (
            [(a, b) for a in range(12) for b in range(12)]
            if name in ("activation", "reshape")
            else [(a, a // 2) for a in range(12)]
        )
        left_out = [(a, b) for a, b in numbers if source_with(registry, (name, a, b)) == without]
        assert len(left_out) <= len(numbers) // 4, (name, left_out)
