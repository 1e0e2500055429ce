"""The cache that FX graph mode quantization fills with networks."""

from __future__ import annotations

import warnings


def release_networks() -> None:
    """Let go of the networks that `torch.ao.quantization.fx` keeps alive after it has prepared or converted them.

    It caches the device of a network under the network itself (`functools.cache`): all of its weights would stay in
    memory for as long as the process lives.
    """
    with warnings.catch_warnings(action="ignore"):  # torch.ao announces its removal when it is imported
        from torch.ao.quantization.fx.utils import assert_and_get_unique_device

    assert_and_get_unique_device.cache_clear()
