"""The published model's code, which MLflow copies into the model and runs where the model is loaded.

It must not import Tunewright: the machine that serves a model has only its requirements.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlflow.models import set_model
from mlflow.pyfunc.model import PythonModel

if TYPE_CHECKING:
    from numpy import ndarray
    from numpy.typing import NDArray


# MLflow warns of each predict() without type hints, whatever the filter says. It would derive a
# signature from them, and the model's own one names shapes and dtypes.
with warnings.catch_warnings(record=True):

    class TunedModel(PythonModel):
        """Runs the artifact through the loader that lies in it."""

        def load_context(self, context: Any) -> None:
            """Load the compiled library. Raises what the artifact's ``loader.py`` raises."""
            folder = Path(context.artifacts["artifact"])
            spec = importlib.util.spec_from_file_location("tunewright_loader", folder / "loader.py")
            if spec is None or spec.loader is None:
                raise ImportError(f"the model's artifact {folder} has no loader.py")
            loader = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(loader)
            self.compiled = loader.CompiledModel(folder)

        def predict(self, context, model_input, params=None):  # type: ignore[no-untyped-def]  # noqa: ARG002
            """A dict of arrays, by the names of the model's inputs, gives a dict of arrays by output name."""
            return self._run(model_input)

        def _run(self, inputs: Mapping[str, ndarray[Any, Any]]) -> dict[str, NDArray[Any]]:
            outputs: dict[str, NDArray[Any]] = self.compiled.run(dict(inputs))
            return outputs


set_model(TunedModel())
