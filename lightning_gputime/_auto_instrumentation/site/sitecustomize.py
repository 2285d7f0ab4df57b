"""Python imports this at its start, in what `lightning_gputime run` runs, and in its children."""

import contextlib
import importlib
import sys

# Another `sitecustomize`, which this one hides, is to run as without.
_own = sys.modules.pop(__name__)
_folder = __file__.rpartition("sitecustomize")[0].rstrip("/\\")
sys.path[:] = [path for path in sys.path if path.rstrip("/\\") != _folder]
try:
    importlib.import_module(__name__)
except ModuleNotFoundError as error:
    if error.name != __name__:
        raise
    sys.modules[__name__] = _own
finally:
    # A child may run by a Python that has no such package.
    with contextlib.suppress(ImportError):
        from lightning_gputime._auto_instrumentation import watch_imports

        watch_imports()
