"""The import step's parent half: a model file becomes one that every engine can translate.

Raw models do not import (Reshape to a computed shape, unknown rank, weights listed as inputs). So
every input dimension is bound to a number and onnxruntime writes the graph back after its basic
optimisations, which fold what the numbers determine and stay within standard ONNX.

onnxruntime's CPU provider has no float16 kernels: a float16 model comes back with casts around
float32 arithmetic.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from tasks.errors import ModelError, SetupError, ShapeError
from tasks.model_source import FetchedModel, external_files, fetch, one_line, read_model
from tasks.records import ModelFile, TensorSpec

#: Part of every digest: raise it when the normalised graph of an unchanged model changes.
NORMALISATION_VERSION = 1

_FLOATS = ("float16", "float32", "float64")
_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_DTYPES = (*_FLOATS, *_INTEGERS, "bool")

Tensors = dict[str, NDArray[Any]]


def import_source(source: str, shapes: Mapping[str, tuple[int, ...]], home: Path) -> ModelFile:
    """Fetch the model at ``source`` into ``home`` and import it; found done the second time.

    Raises what ``fetch`` and ``import_model_file`` raise.
    """
    folder = home / "models"
    folder.mkdir(parents=True, exist_ok=True)
    return import_model_file(fetch(source, folder), shapes, folder)


def import_model_file(fetched: FetchedModel, shapes: Mapping[str, tuple[int, ...]], work_dir: Path) -> ModelFile:
    """Bind every input dimension of the model and normalise it into ``work_dir``.

    ``shapes`` gives whole shapes by input name; what it does not name must be static in the graph.
    The normalised file is named by the digest and written once.

    Raises ModelError, ShapeError, or SetupError when ``work_dir`` cannot be written.
    """
    model = read_model(fetched.path)
    data_files = external_files(model, fetched.path)
    _bind_dimensions(model, shapes)
    inputs = _specs(model.graph.input)
    digest = _digest(fetched.path, data_files, inputs)
    path = work_dir.absolute() / f"{digest[:16]}.onnx"
    if not path.exists():
        try:
            work_dir.mkdir(parents=True, exist_ok=True)
            _normalise(model, fetched.path, path)
        except OSError as err:
            raise SetupError(f"cannot write {path}: {err.strerror or err}; check the folder") from err
    normalised = read_model(path)
    return ModelFile(
        source=fetched.source,
        name=fetched.name,
        digest=digest,
        path=str(path),
        original_path=str(fetched.path.absolute()),
        inputs=inputs,
        outputs=_specs(normalised.graph.output),
        opset=next((o.version for o in normalised.opset_import if o.domain in ("", "ai.onnx")), 0),
        source_version=fetched.source_version,
    )


def _bind_dimensions(model: onnx.ModelProto, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Give every input its shape, in place; forget the shapes in the graph that follow from it."""
    graph = model.graph
    weights = {tensor.name for tensor in graph.initializer}
    weights |= {sparse.values.name for sparse in graph.sparse_initializer}
    inputs = [value for value in graph.input if value.name not in weights]
    unknown = sorted(set(shapes) - {value.name for value in inputs})
    if unknown:
        names = ", ".join(f"{value.name} [{_shape_text(value)}]" for value in inputs)
        raise ShapeError(f"the model has no input {', '.join(unknown)}; its inputs are {names}")
    missing = [text for value in inputs if (text := _bind_input(value, shapes.get(value.name)))]
    if missing:
        raise ShapeError("; ".join(missing))
    # Weights listed as inputs may be overridden by a caller, so onnxruntime would not fold them.
    del graph.input[:]
    graph.input.extend(inputs)
    # Before version 4 every weight must be an input.
    model.ir_version = max(model.ir_version, 4)
    del graph.value_info[:]
    for value in graph.output:
        if value.type.WhichOneof("value") == "tensor_type":
            value.type.tensor_type.ClearField("shape")


def _bind_input(value: onnx.ValueInfoProto, shape: tuple[int, ...] | None) -> str:
    """Bind one input in place; the text of the error where sizes are missing, else empty."""
    if value.type.WhichOneof("value") != "tensor_type":
        raise ModelError(f"input {value.name} is no tensor; only tensors can be compiled")
    tensor = value.type.tensor_type
    if shape is not None:
        _check_shape(value, shape)
        del tensor.shape.dim[:]
        tensor.shape.SetInParent()
        for size in shape:
            tensor.shape.dim.add().dim_value = size
        return ""
    if not tensor.HasField("shape"):
        return f"input {value.name} has no shape in the model; give all of it: --shape {value.name}=1,..."
    unbound = [
        f"dimension {position} ({dim.dim_param or 'unnamed'})"
        for position, dim in enumerate(tensor.shape.dim)
        if dim.dim_value <= 0
    ]
    if not unbound:
        return ""
    flag = f"--shape {value.name}={_shape_text(value)}"
    return f"input {value.name} has no size for {', '.join(unbound)}; give {flag} with a number for each ?"


def _check_shape(value: onnx.ValueInfoProto, shape: tuple[int, ...]) -> None:
    """Raises ShapeError where ``shape`` contradicts the model or holds anything but positive ints."""
    given = ",".join(str(size) for size in shape)
    if not all(isinstance(size, int) and size > 0 for size in shape):
        raise ShapeError(f"--shape {value.name}={given}: sizes must be positive whole numbers")
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        return
    sizes = [dim.dim_value for dim in tensor.shape.dim]
    if len(sizes) != len(shape) or any(0 < size != new for size, new in zip(sizes, shape, strict=True)):
        raise ShapeError(
            f"--shape {value.name}={given} does not fit input {value.name}, which has "
            f"{len(sizes)} dimensions: [{_shape_text(value)}]"
        )


def _shape_text(value: onnx.ValueInfoProto) -> str:
    """The shape as the flag takes it, ``?`` for each size that the model leaves open."""
    return ",".join(str(d.dim_value) if d.dim_value > 0 else "?" for d in value.type.tensor_type.shape.dim)


def _specs(values: Iterable[onnx.ValueInfoProto]) -> tuple[TensorSpec, ...]:
    """The specs of values with known shapes, in order. Raises ModelError for a dtype that none can feed."""
    specs = []
    for value in values:
        tensor = value.type.tensor_type
        try:
            dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type).name
        except (KeyError, ValueError):
            dtype = f"number {tensor.elem_type}"
        if dtype not in _DTYPES:
            raise ModelError(f"{value.name} has dtype {dtype}; inputs and outputs can be {', '.join(_DTYPES)}")
        specs.append(TensorSpec(value.name, tuple(d.dim_value for d in tensor.shape.dim), dtype))
    return tuple(specs)


def _digest(path: Path, data_files: Mapping[str, Path], inputs: Sequence[TensorSpec]) -> str:
    """sha256 of all that the normalised file is made of: bytes, shapes, and the versions that make it."""
    import onnxruntime

    digest = hashlib.sha256()
    for name, file in (("", path), *data_files.items()):
        digest.update(f"{name}\x00{file.stat().st_size}\x00".encode())
        with file.open("rb") as stream:
            while chunk := stream.read(1 << 20):
                digest.update(chunk)
    bound = sorted((spec.name, spec.shape) for spec in inputs)
    digest.update(f"{bound}\x00{NORMALISATION_VERSION}\x00{onnxruntime.__version__}".encode())
    return digest.hexdigest()


def _normalise(model: onnx.ModelProto, original: Path, path: Path) -> None:
    """Write the graph of ``model`` (the file ``original``, bound) to ``path``, optimised; all or nothing."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".normalise-") as folder:
        written = Path(folder) / path.name
        session = _basic_session(model, original, written)
        normalised = read_model(written)
        _tidy(normalised, model)
        _check_domains(normalised, model, original)
        _complete_output_shapes(normalised, session, original)
        _specs(normalised.graph.output)
        written.write_bytes(normalised.SerializeToString())
        data = written.with_suffix(".data")
        if data.exists():
            data.replace(path.with_suffix(".data"))
        written.replace(path)


def _basic_session(model: onnx.ModelProto, original: Path, written: Path) -> Any:
    """A session on ``model`` that writes its graph to ``written``, external weights beside it."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.optimized_model_filepath = str(written)
    if external_files(model, original):
        # The folder, because a model in memory has none; the file, because the graph would keep
        # pointing at the original's data otherwise.
        folder = str(original.parent.resolve())
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
        data = written.with_suffix(".data").name
        options.add_session_config_entry("session.optimized_model_external_initializers_file_name", data)
    return _session(model.SerializeToString(), options, original)


def _session(model: bytes | str, options: Any, original: Path) -> Any:
    """An onnxruntime session; what it raises becomes one line of ModelError."""
    import onnxruntime

    try:
        return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as err:  # its classes share no base of their own
        version = onnxruntime.__version__
        too_new = re.search(r"Opset (\d+) is under .* domain (\S+) is till opset (\d+)", str(err), re.DOTALL)
        if too_new:
            opset, domain, newest = too_new.groups()
            raise ModelError(
                f"{original} uses opset {opset} of {domain}, onnxruntime {version} supports up to {newest}: "
                f"export the model with opset {newest} or install a newer onnxruntime"
            ) from err
        raise ModelError(f"onnxruntime {version} cannot load {original}: {_reason(err)}") from err


def _reason(err: Exception) -> str:
    """onnxruntime's message on one line, without its status code and its C++ signatures."""
    text = re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", one_line(err, limit=10_000))
    return one_line(re.sub(r"^/\S+\.(?:cc|h):\d+ .*?\) (?=[A-Z])", "", text))


def _tidy(normalised: onnx.ModelProto, bound: onnx.ModelProto) -> None:
    """Keep only the inputs of the bound model, and only the operator sets that a node uses."""
    del normalised.graph.input[:]
    normalised.graph.input.extend(bound.graph.input)
    # onnxruntime lists every domain that it knows.
    asked_for = {opset.domain for opset in bound.opset_import}
    opsets = [opset for opset in normalised.opset_import if opset.domain in asked_for]
    del normalised.opset_import[:]
    normalised.opset_import.extend(opsets)


def _check_domains(normalised: onnx.ModelProto, bound: onnx.ModelProto, path: Path) -> None:
    """No engine translates the operators that onnxruntime invents; its basic level is to add none."""
    known = {"", "ai.onnx"} | {node.domain for node in bound.graph.node}
    known |= {node.domain for function in bound.functions for node in function.node}
    added = {f"{n.domain}.{n.op_type}" for n in normalised.graph.node if n.domain not in known}
    if added:
        raise ModelError(f"onnxruntime put {', '.join(sorted(added))} into {path}: report this, with the model")


def _complete_output_shapes(normalised: onnx.ModelProto, session: Any, path: Path) -> None:
    """Set output shapes that inference left open to what runs show, in place.

    Raises ModelError when three different inputs do not agree: the shape depends on the data.
    """
    outputs = normalised.graph.output
    for value in outputs:
        if value.type.WhichOneof("value") != "tensor_type":
            raise ModelError(f"output {value.name} of {path} is no tensor; only tensors can be compiled")
    open_outputs = [value for value in outputs if not _is_bound(value)]
    if not open_outputs:
        return
    inputs = _specs(normalised.graph.input)
    feeds = [_random_tensors(inputs, seed) for seed in (0, 1)]
    # Random floats are never zero, which operators like NonZero count.
    feeds.append({name: np.zeros_like(array) for name, array in feeds[0].items()})
    runs = [_run(session, [value.name for value in open_outputs], feed, path) for feed in feeds]
    for value in open_outputs:
        shapes = {run[value.name].shape for run in runs}
        if len(shapes) != 1 or 0 in (shape := shapes.pop()):
            raise ModelError(
                f"the shape of output {value.name} of {path} depends on the data or is empty: only "
                "fixed shapes can be compiled; cut the model before it"
            )
        value.type.tensor_type.ClearField("shape")
        value.type.tensor_type.shape.SetInParent()
        for size in shape:
            value.type.tensor_type.shape.dim.add().dim_value = size


def _is_bound(value: onnx.ValueInfoProto) -> bool:
    tensor = value.type.tensor_type
    return tensor.HasField("shape") and all(dim.dim_value > 0 for dim in tensor.shape.dim)


def seeded_inputs(model: ModelFile, seed: int) -> Tensors:
    """Inputs for ``model``, the same for the same seed, input name, shape and dtype.

    Floats are standard normal, as normalised images and embeddings are. Bytes are 0 to 127, other
    integers 0 or 1: they may be indices (token types) or masks, and these fit every vocabulary.
    """
    return _random_tensors(model.inputs, seed)


def _random_tensors(specs: Iterable[TensorSpec], seed: int) -> Tensors:
    return {spec.name: _random_tensor(spec, seed) for spec in specs}


def _random_tensor(spec: TensorSpec, seed: int) -> NDArray[Any]:
    name_key = hashlib.sha256(spec.name.encode()).digest()[:8]
    random = np.random.default_rng([seed, int.from_bytes(name_key, "big")])
    dtype = np.dtype(spec.dtype)
    if spec.dtype in _FLOATS:
        return random.standard_normal(spec.shape).astype(dtype)
    return random.integers(0, 128 if spec.dtype in ("int8", "uint8") else 2, spec.shape).astype(dtype)


class OnnxRuntimeModel:
    """The original model in onnxruntime at its default, full optimisation: what we are compared with.

    Threads spin while they wait, onnxruntime's default and its fastest: a session that is timed
    beside another runtime takes cores from it only while it runs, and for a moment after.
    """

    def __init__(self, model: ModelFile, threads: int, exact: bool = False) -> None:
        """Load the model to run on ``threads`` threads; ``exact``, where it can be, without saturating.

        On a CPU without VNNI onnxruntime adds products of eight bits in sixteen, which overflow where weights use
        all of their range. Raises ModelError.
        """
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 4
        if exact:
            options.add_session_config_entry("session.x64quantprecision", "1")
        self._path = Path(model.original_path)
        self._output_names = [spec.name for spec in model.outputs]
        try:
            self._session = _session(model.original_path, options, self._path)
        except ModelError:
            if not exact:
                raise
            # Of some models of signed bytes onnxruntime makes no such session.
            options.add_session_config_entry("session.x64quantprecision", "0")
            self._session = _session(model.original_path, options, self._path)

    def run(self, inputs: Tensors) -> Tensors:
        """The outputs by name for ``inputs`` by name. Raises ModelError."""
        return _run(self._session, self._output_names, inputs, self._path)

    def time_ms(self, inputs: Tensors, repeats: int) -> tuple[float, ...]:
        """The milliseconds that each of ``repeats`` runs took; no run goes before to warm up."""
        samples_ms = []
        for _ in range(repeats):
            start_s = time.perf_counter()
            self.run(inputs)
            samples_ms.append((time.perf_counter() - start_s) * 1e3)
        return tuple(samples_ms)


def reference_outputs(model: ModelFile, inputs: Tensors, threads: int) -> Tensors:
    """The original model's outputs in onnxruntime, by name. Raises ModelError."""
    return OnnxRuntimeModel(model, threads).run(inputs)


def _run(session: Any, names: Sequence[str], inputs: Tensors, path: Path) -> Tensors:
    try:
        return dict(zip(names, session.run(names, inputs), strict=True))
    except Exception as err:  # as for _session
        shapes = ", ".join(f"{name} {array.shape}" for name, array in inputs.items())
        raise ModelError(f"onnxruntime cannot run {path} with {shapes}: {_reason(err)}") from err
