"""`examples/python/older`: each Python block of older guides, as a program, beside an engine; with Dynamo's own package, too, with another import line."""

import os
import pathlib
import re
import sys

import pytest

from python_rig import BUILTIN, EXAMPLES, environment
from test_python_runtime import Program, store  # noqa: F401

OLDER = EXAMPLES / "older"
DYNAMO = os.environ.get("KVASIR_DYNAMO_PYTHON")
PRINTED = {
    "automatic.py": "16 tokens",
    "client.py": "direct: [7, 8]",
    "custom_load.py": "5 tokens",
    "generate.py": "Generated 20 tokens: [1, 2, 3",
    "lowest_ttft.py": "Generated 20 tokens",
    "manual.py": "3 items, the first [700]",
    "probe.py": "2 tokens",
}
IMPORT = re.compile(r"^from kvasir(\._core)? import ", re.MULTILINE)


def test_each_file_is_listed():
    files = {path.name for path in OLDER.glob("*.py")}
    assert files == {*PRINTED, "register.py"}
    assert files == set(re.findall(r"\]\((\w+\.py)\)", (OLDER / "README.md").read_text()))


def programs_of(package, folder, names):
    """The files, with the import line of the package; and how they are run."""
    python = sys.executable
    for name in names:
        text, changed = (OLDER / name).read_text(), 1
        if package == "dynamo":
            text, changed = IMPORT.subn("from dynamo_older_names import ", text)
        assert changed == 1, name
        (folder / name).write_text(text)
    if package == "dynamo":
        if not DYNAMO:
            pytest.skip("NO KVASIR_DYNAMO_PYTHON: Dynamo's own package is NOT compared")
        python = DYNAMO
    return python


def environment_of(package, folder):
    env = environment(folder)
    if package == "dynamo":
        env |= {"PYTHONPATH": str(pathlib.Path(__file__).parent), "PYTHONDONTWRITEBYTECODE": "1"}
    return env


@pytest.mark.parametrize("package", ["kvasir", "dynamo"])
def test_programs_with_older_names(store, tmp_path, package):  # noqa: F811
    python, env = programs_of(package, tmp_path, PRINTED), environment_of(package, store)
    programs = {name: Program(tmp_path / name, env=env, python=python) for name in PRINTED}
    for name, program in programs.items():
        program.said(PRINTED[name])
        program.process.wait(30)
        assert program.process.returncode == 0, program.log()


@pytest.mark.parametrize("package", ["kvasir", "dynamo"])
def test_workers_of_two_roles_register(tmp_path, package):
    python, env = programs_of(package, tmp_path, ["register.py"]), environment_of(package, tmp_path)
    program = Program(tmp_path / "register.py", BUILTIN, env=env, python=python)
    ids = [re.search(r"worker (\d+)", program.said(f"{role} worker")).group(1) for role in ("decode", "prefill")]
    assert all(ids)
    program.process.kill()
    program.process.wait(20)
