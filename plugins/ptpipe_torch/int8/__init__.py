"""Quantized tensors and calibration ranges: torch.ao and the eager quantized-tensor API are used here alone."""
