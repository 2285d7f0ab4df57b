"""Runs the code cells of a notebook, and prints what its kernel would show."""

import ast
import json
import sys
from pathlib import Path
from typing import Any


def main(path: str) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for cell in json.loads(Path(path).read_text())["cells"]:
        if cell["cell_type"] == "code":
            run_cell(ast.parse("".join(cell["source"]), path), namespace)


def run_cell(cell: ast.Module, namespace: dict[str, Any]) -> None:
    last = cell.body.pop() if isinstance(cell.body[-1], ast.Expr) else None
    exec(compile(cell, "cell", "exec"), namespace)
    if isinstance(last, ast.Expr):
        shown = eval(compile(ast.Expression(last.value), "cell", "eval"), namespace)
        if shown is not None:
            print(shown, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
