"""`examples/python/older`: each Python block of older guides, as a program, beside an engine; with Dynamo's own package where it still has the names."""

import os
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
# What 1.6.1 of Dynamo calls the same things. It has nothing for the others.
TRANSLATED = {
    "from kvasir import DistributedRuntime, KvPushRouter, KvRouterConfig": "from dynamo.llm import KvRouter as KvPushRouter, KvRouterConfig\nfrom dynamo.runtime import DistributedRuntime",
    "from kvasir import DistributedRuntime": "from dynamo.runtime import DistributedRuntime",
    'runtime.namespace("dynamo").component("backend").endpoint("generate").client()': 'await runtime.endpoint("dynamo.backend.generate").client()',
    'runtime.namespace("dynamo").component("backend").endpoint("generate")': 'runtime.endpoint("dynamo.backend.generate")',
    '    namespace = runtime.namespace("dynamo")\n    component = namespace.component("backend")\n    endpoint = component.endpoint("generate")\n': '    endpoint = runtime.endpoint("dynamo.backend.generate")\n',
}


def test_each_file_is_listed():
    files = {path.name for path in OLDER.glob("*.py")}
    assert files == {*PRINTED, "register.py"}
    assert files == set(re.findall(r"\]\((\w+\.py)\)", (OLDER / "README.md").read_text()))


@pytest.mark.parametrize("package", ["kvasir", "dynamo"])
def test_programs_with_older_names(store, tmp_path, package):  # noqa: F811
    env, python, programs = environment(store), sys.executable, {}
    if package == "dynamo":
        if not DYNAMO:
            pytest.skip("NO KVASIR_DYNAMO_PYTHON: Dynamo's own package is NOT compared")
        python = DYNAMO
        env.pop("PYTHONPATH")
    for name in PRINTED:
        text = (OLDER / name).read_text()
        if package == "dynamo":
            for ours, theirs in TRANSLATED.items():
                text = text.replace(ours, theirs)
            if "best_worker_id" in text:
                continue
        (tmp_path / name).write_text(text)
        programs[name] = Program(tmp_path / name, env=env, python=python)
    for name, program in programs.items():
        program.said(PRINTED[name])
        program.process.wait(30)
        assert program.process.returncode == 0, program.log()
    assert len(programs) >= 5


def test_workers_of_two_roles_register(tmp_path):
    program = Program(OLDER / "register.py", BUILTIN, env=environment(tmp_path))
    ids = [re.search(r"worker (\d+)", program.said(f"{role} worker")).group(1) for role in ("decode", "prefill")]
    assert ids[0] != ids[1]
    program.process.kill()
    program.process.wait(20)
