"""Differences between the outputs of a network and those of its teacher, for distillation."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def class_divergence(logits: torch.Tensor, teacher_logits: torch.Tensor, axis: int, temperature: float) -> torch.Tensor:
    """Return T^2 KL(teacher || network) of the distributions over classes along `axis`, which is reduced; float32.

    softmax(logits / T) on both sides; with T^2, gradients keep their size whatever T is (G. Hinton et al., Distilling
    the Knowledge in a Neural Network, arXiv 1503.02531, section 2).
    """
    from torch.nn.functional import kl_div, log_softmax

    log_p, log_q = (log_softmax(of.float() / temperature, axis) for of in (teacher_logits, logits))
    return kl_div(log_q, log_p, reduction="none", log_target=True).sum(axis) * temperature**2


def label_divergence(logits: torch.Tensor, teacher_logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return T^2 KL(teacher || network) of the probabilities of independent labels, of the shape of `logits`."""
    from torch.nn.functional import logsigmoid

    teacher, own = (of.float() / temperature for of in (teacher_logits, logits))
    has = teacher.sigmoid() * (logsigmoid(teacher) - logsigmoid(own))
    has_not = (-teacher).sigmoid() * (logsigmoid(-teacher) - logsigmoid(-own))
    return (has + has_not) * temperature**2
