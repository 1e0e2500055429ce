"""Quantized tensors: the only package that uses `torch.ao` and torch's eager quantized-tensor API.

engine: quantized engines. fx: FX graph mode quantization. observers: observers and fake quantization. layers: QAT,
int8 and dynamic layers and their weights. recurrent: dynamic LSTM and GRU layers. int8_state: int8 state dicts as plain
tensors. ranges: calibrated ranges.

torch warns that `torch.ao` will be removed; it is still there in torch 2.15. Replacing it is a change to this package.
"""
