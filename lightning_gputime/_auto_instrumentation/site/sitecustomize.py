"""Python imports this when it starts, in the processes of `lightning_gputime run`.

Any Python imports it, Python 2 as well: the script may start tools of another environment.
"""

import importlib
import sys

# Run the `sitecustomize` that this file hides, if any.
_own = sys.modules.pop(__name__)
_folder = __file__.rpartition("sitecustomize")[0].rstrip("/\\")
sys.path[:] = [path for path in sys.path if path.rstrip("/\\") != _folder]
try:
    importlib.import_module(__name__)
except ImportError as error:
    if getattr(error, "name", __name__) != __name__:
        raise
    sys.modules[__name__] = _own
finally:
    # Older Pythons cannot read the package, and a newer one may not have it.
    if sys.version_info >= (3, 11):  # noqa: UP036  # see above
        try:
            from lightning_gputime._auto_instrumentation import watch_imports
        except ImportError:
            pass
        else:
            watch_imports()
