"""Write the layers of an artifact as ONNX, checked by onnxruntime (docs/do/other_programs.md)."""

FUNCTIONS = {
    "add_onnx_towers": "pipeline.extras.onnx.certificate:add_onnx_towers",
    "certify_onnx_towers": "pipeline.extras.onnx.certificate:certify_towers",
    "describe_onnx": "pipeline.extras.onnx.certificate:describe_onnx",
    "onnx_addition": "pipeline.extras.onnx.certificate:onnx_addition",
}
