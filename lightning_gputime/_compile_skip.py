"""What torch.compile leaves alone: this package, but for what compiled code may carry."""

from functools import cache
from pathlib import Path

_TRACED = ("__init__.py", "_timer.py", "_boundaries/module_hooks.py", "_boundaries/named.py")


@cache
def apply_compile_skips() -> None:
    """Let compiled code call functions of this package without tracing into them.

    As `torch.compiler.disable`, but at no cost in the call. Call it before they may run, not at
    import: torch's compiler takes a second.
    """
    from torch._dynamo.trace_rules import FORCE_SKIP_FILES

    here = Path(__file__).parent
    FORCE_SKIP_FILES.update(map(str, {*here.rglob("*.py")} - {here / name for name in _TRACED}))
