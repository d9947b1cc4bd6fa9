"""The names of a package, with the parameters and defaults of each, as JSON: python python_names.py PACKAGE"""

import importlib
import inspect
import json
import sys

MODULES = ("_core", "llm", "llm.exceptions", "runtime")


def parameters(of):
    """Names, kinds and defaults; none where Python cannot tell."""
    try:
        found = inspect.signature(of).parameters.values()
    except (TypeError, ValueError):
        return None
    plain = [p for p in found if p.name not in ("self", "cls") and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    return {p.name: [p.kind is p.KEYWORD_ONLY, None if p.default is p.empty else repr(p.default)] for p in plain}


def described(value):
    """What a name stands for."""
    about = {"parameters": parameters(value) if callable(value) else None, "members": {}}
    if inspect.isclass(value):
        about["bases"] = [base.__name__ for base in value.__mro__[1:]]
        for name in sorted({*dir(value), *vars(value), *getattr(value, "__annotations__", {})}):
            if not name.startswith("_") and not hasattr(Exception, name):
                member = getattr(value, name, None)
                about["members"][name] = parameters(member) if callable(member) else None
    return about


def main(package):
    found = {}
    for module in MODULES:
        for name, value in vars(importlib.import_module(f"{package}.{module}")).items():
            is_own = getattr(value, "__module__", "").split(".")[0] in (package, "builtins")
            if is_own and not name.startswith("_") and not inspect.ismodule(value):
                found.setdefault(name, {"in": [], **described(value)})["in"].append(module)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
