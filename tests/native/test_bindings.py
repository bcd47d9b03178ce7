"""The stub against the compiled module, the exception tree, constants and syncfs."""

import ast
import inspect
import re
from pathlib import Path

import pytest

import moeinf.native as native
from moeinf import errors
from moeinf.native import _native

STUB = ast.parse(Path(native.__file__).with_name("_native.pyi").read_text())


def is_public(name: str) -> bool:
    return not name.startswith("_") or name == "__init__"


def stub_parameters(function: ast.FunctionDef) -> list[str]:
    arguments = function.args
    return [a.arg for a in arguments.posonlyargs + arguments.args + arguments.kwonlyargs]


def bound_parameters(function: object) -> list[str]:
    """Return parameter names from the signature on the first line of pybind11's docstring."""
    line = (inspect.getdoc(function) or "").splitlines()[0]
    inside = line[line.index("(") + 1 : line.rindex(")")]
    return re.findall(r"(?:^|, )(\w+): ", inside)


def stub_names(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    names: dict[str, ast.stmt] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names[node.name] = node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names[node.target.id] = node
        elif isinstance(node, ast.ImportFrom):  # `import X as X` binds X again
            names |= {alias.name: node for alias in node.names if alias.asname == alias.name}
    return {name: node for name, node in names.items() if is_public(name)}


def bound_names(owner: object) -> set[str]:
    return {name for name in vars(owner) if is_public(name)}


MODULE = stub_names(STUB.body)
EXCEPTIONS = {"CorruptShard", "Cancelled", "NoDriver", "DeviceError", "OutOfDeviceMemory"}
CLASSES = {
    name: node
    for name, node in MODULE.items()
    if isinstance(node, ast.ClassDef) and name not in EXCEPTIONS
}


def test_stub_module_and_package_have_the_same_names():
    assert set(MODULE) == bound_names(_native)
    assert set(MODULE) == set(native.__all__)
    assert all(getattr(native, name) is getattr(_native, name) for name in native.__all__)


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_stub_and_class_have_the_same_members(name):
    bound = bound_names(getattr(_native, name))
    if name == "Counters":
        bound -= {"__init__"}  # never constructed from Python
    assert set(stub_names(CLASSES[name].body)) == bound


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_stub_and_class_have_the_same_parameters(name):
    bound = getattr(_native, name)
    for member, node in stub_names(CLASSES[name].body).items():
        assert isinstance(node, ast.FunctionDef)
        is_property = any(
            isinstance(d, ast.Name) and d.id == "property" for d in node.decorator_list
        )
        assert isinstance(vars(bound)[member], property) is is_property, member
        if not is_property:
            assert stub_parameters(node) == bound_parameters(vars(bound)[member]), member


def test_stub_and_module_functions_have_the_same_parameters():
    functions = {n: f for n, f in MODULE.items() if isinstance(f, ast.FunctionDef)}
    assert set(functions) == {n for n in native.__all__ if inspect.isbuiltin(getattr(native, n))}
    for name, node in functions.items():
        assert stub_parameters(node) == bound_parameters(getattr(_native, name))


def test_the_exception_tree():
    assert native.CorruptShard.__bases__ == (OSError,)
    assert native.Cancelled.__bases__ == (RuntimeError,)
    assert native.NoDriver.__bases__ == (RuntimeError,)
    assert native.DeviceError is errors.DeviceError
    assert native.OutOfDeviceMemory is errors.OutOfDeviceMemory
    assert native.CorruptShard.__module__ == "moeinf.native._native"


def test_constants():
    assert native.PAGE_BYTES == 4096
    assert native.SHARD_DATA_OFFSET == 4096
    assert float("inf") == native.DEMAND
    assert native.RESIDENT == 0
    assert native.MAX_READERS == 64


def test_classes_are_final():
    for name in CLASSES:
        with pytest.raises(TypeError):
            type("Sub", (getattr(_native, name),), {})


def test_counters_are_made_by_the_queue_only():
    with pytest.raises(TypeError, match="No constructor"):
        native.Counters()


def test_syncfs(tmp_path):
    with (tmp_path / "file").open("wb") as file:
        file.write(b"x")
        native.syncfs(file.fileno())
    with pytest.raises(OSError, match="Bad file descriptor") as caught:
        native.syncfs(-1)
    assert caught.value.errno == 9
