"""What can be known of a function in a Python file without running it. Imports neither torch nor numpy."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from ptpipe import JSON, Plan, Problem, nearest, source_code

Definition: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_MAX_IMPORTS = 20
"""How many modules of a folder one name may be imported through."""


def function_problems(plan: Plan, stage_id: str, option: str = "function", num_given: int = 0) -> Iterator[Problem]:
    """Yield what is wrong with the function that a stage's options `file` and `option` name.

    `num_given`: how many arguments it gets, by position; 0: those of the option `arguments`, by name. It is read, not
    run: what is assigned, decorated or imported with a star may be anything, and is checked where it is called.
    """
    options = plan[stage_id].options
    file, name = Path(str(options["file"])).expanduser().absolute(), str(options[option])
    given = {} if num_given else options["arguments"]
    assert isinstance(given, dict), given
    try:
        if _is_in_package(file):
            yield plan.problem(stage_id, _package_remedy(file, name), "file")
            return
        found = _find(file, name)
    except (SyntaxError, ValueError, RecursionError) as error:
        place = f":{error.lineno}" if isinstance(error, SyntaxError) else ""
        text = error.msg if isinstance(error, SyntaxError) else str(error)
        yield plan.problem(stage_id, f"{file}{place} is no Python code: {text}", "file")
        return
    except LookupError as error:
        names = error.args[1] if len(error.args) > 1 else ()
        yield plan.problem(stage_id, str(error.args[0]), option, suggestion=nearest(name, names))
        return
    if isinstance(found, ast.AsyncFunctionDef):
        yield plan.problem(stage_id, f"{name} in {file.name} is async: it must be a plain function", option)
    elif found is not None:
        parameters = _parameters(found)
        if parameters is not None:
            for message, path, suggestion in _misfits(name, parameters, given, num_given):
                yield plan.problem(stage_id, message, *(path or (option,)), suggestion=suggestion)


def _find(file: Path, name: str) -> Definition | None:
    """Return the definition of a name, in a file or in the module of its folder that it is imported from.

    None where it may be anything. Raises LookupError, with the names that there are, for one that is missing or is
    imported from elsewhere.
    """
    modules = source_code(file).modules
    path, module = file, ""
    for _ in range(_MAX_IMPORTS):
        names = _top_level(path)
        if name not in names:
            if "*" in names:
                return None
            known = [known for known, node in names.items() if isinstance(node, Definition)]
            raise LookupError(f"{path.name} has no function or class {name!r} at its top level", known)
        node = names[name]
        if not isinstance(node, ast.ImportFrom | ast.Import):
            return node if isinstance(node, Definition) else None
        source = _module_of(node, module, path) if isinstance(node, ast.ImportFrom) else ""
        if not source and isinstance(node, ast.ImportFrom):
            return None  # from the file's own package, if it is run as a part of that; another one where it is not
        if source not in modules:
            raise LookupError(f"{name!r} is imported into {path.name} from elsewhere: define a function that calls it")
        assert isinstance(node, ast.ImportFrom)
        path, module = modules[source], source
        name = next(a.name for a in node.names if (a.asname or a.name) == name)
    return None


def _module_of(node: ast.ImportFrom, module: str, path: Path) -> str:
    """Return the full name of what a module imports from. `path`: the module's; "" for a package that there is not."""
    if not node.level:
        return node.module or ""
    packages = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    packages = packages[: max(0, len(packages) - node.level + 1)]
    return ".".join((*packages, *([node.module] if node.module else ()))) if packages else ""


def _is_in_package(file: Path) -> bool:
    """Return whether a file can't be run on its own, since it imports from the package that it is a part of."""
    # Not below `try:` or `if TYPE_CHECKING:`, where such an import may fail or is left out.
    return any(isinstance(node, ast.ImportFrom) and node.level > 0 for node in _parsed(file).body)


def _package_remedy(file: Path, name: str) -> str:
    """Say what to do with a file for which `_is_in_package` holds. `name`: of the function that is wanted."""
    module = ".".join((file.parent.name, *([] if file.stem == "__init__" else [file.stem])))
    return (
        f"{file.name} imports from the package {file.parent.name} that it is a part of, so it can't be run on its own: "
        f"name a file beside the folder {file.parent.name}, with `from {module} import {name}` in it"
    )


def _top_level(path: Path) -> dict[str, ast.stmt]:
    """Return what binds each name at a module's top level, the last one where several do; `*` for a star import."""
    names: dict[str, ast.stmt] = {}
    waiting: list[ast.stmt] = _parsed(path).body[::-1]
    while waiting:
        node = waiting.pop()
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names[name] = node
            case ast.Import() | ast.ImportFrom():
                names |= {alias.asname or alias.name.partition(".")[0]: node for alias in node.names}
            case ast.If() | ast.Try() | ast.With():
                inner = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
                handlers = [child for handler in getattr(node, "handlers", ()) for child in handler.body]
                waiting += [*inner, *handlers][::-1]
            case _:
                targets = (child for child in ast.walk(node) if isinstance(child, ast.Name))
                names |= {child.id: node for child in targets if isinstance(child.ctx, ast.Store)}
    return names


def _parsed(path: Path) -> ast.Module:
    with warnings.catch_warnings(action="ignore"):  # Python gives a SyntaxWarning when it compiles the code
        return ast.parse(path.read_bytes())


def _parameters(found: ast.FunctionDef | ast.ClassDef) -> ast.arguments | None:
    """Return the parameters of a function, or those of a class's own `__init__` without `self`; None where unknown."""
    if found.decorator_list:
        return None
    if isinstance(found, ast.FunctionDef):
        return found.args
    own = [node for node in found.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    if not own or own[-1].decorator_list or not own[-1].args.args or own[-1].args.posonlyargs:
        return None
    parameters = own[-1].args
    return ast.arguments(
        posonlyargs=[],
        args=parameters.args[1:],
        vararg=parameters.vararg,
        kwonlyargs=parameters.kwonlyargs,
        kw_defaults=parameters.kw_defaults,
        kwarg=parameters.kwarg,
        defaults=parameters.defaults[-len(parameters.args[1:]) :] if parameters.args[1:] else [],
    )


def _misfits(
    name: str, parameters: ast.arguments, given: Mapping[str, JSON], num_given: int
) -> Iterator[tuple[str, Sequence[str], str | None]]:
    """Yield message, option and suggestion for each argument that is missing or one too many."""
    by_position = [*parameters.posonlyargs, *parameters.args]
    if len(by_position) < num_given and parameters.vararg is None:
        yield f"{name}() takes {len(by_position)} arguments, and is called with {num_given}", (), None
    named = {argument.arg for argument in (*by_position[num_given:], *parameters.kwonlyargs)}
    named -= {argument.arg for argument in parameters.posonlyargs}
    meant = set()
    for argument in given:
        if argument not in named and parameters.kwarg is None:
            suggestion = nearest(argument, named - given.keys())
            meant.add(suggestion)
            yield f"{name}() has no argument {argument!r}", ("arguments", argument), suggestion
    num_required = len(by_position) - len(parameters.defaults)
    required = [argument.arg for argument in by_position[num_given:num_required]]
    pairs = zip(parameters.kwonlyargs, parameters.kw_defaults, strict=True)
    required += [argument.arg for argument, default in pairs if default is None]
    missing = [argument for argument in required if argument not in given and argument not in meant]
    if missing:
        how = "it is called with outputs and targets alone" if num_given else "give values under arguments"
        yield f"{name}() needs {', '.join(missing)}, too: {how}", (), None
