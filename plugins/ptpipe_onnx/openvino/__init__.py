"""Models of OpenVINO, made of ONNX files."""
