"""Models: recipes, tensors, predictors and ONNX files. Importing these imports no torch."""
