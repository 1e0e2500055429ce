"""Quantization of ONNX files: by ONNX Runtime's own quantizer, and of weights alone."""
