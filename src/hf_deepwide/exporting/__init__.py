"""Models in the forms of other engines and libraries: CTranslate2, ONNX, and stock classes of Transformers."""
