"""Renders every snippet of cases.json again with Jinja2, set up as the transformers library does, and writes its output.

    python3 testdata/jinja/make.py        (needs jinja2; run it after adding a snippet)
"""
import json
import pathlib

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def main():
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    path = pathlib.Path(__file__).with_name("cases.json")
    data = json.loads(path.read_text())
    cases = []
    for case in data["cases"]:
        context = {key: json.loads(text) for key, text in data["context"].items()}
        try:
            output = env.from_string(case["template"]).render(**context, **context["kwargs"], add_generation_prompt=True)
        except Exception:
            output = None
        cases.append({"template": case["template"], "output": output})
    data["cases"] = cases
    path.write_text(json.dumps(data, ensure_ascii=False, indent=1) + "\n")


main()
