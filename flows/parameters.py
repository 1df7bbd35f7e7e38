"""What the flows are started with: from the command line, from a deployment, from an event."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import BaseModel, Field, field_validator, model_validator

from infra.settings import settings
from tasks.engines.child import ChildOptions
from tasks.records import EngineInfo

DEFAULT_MINUTES = 30.0


class TuneParameters(BaseModel):
    """One tuning run. Without ``trials`` and ``minutes`` it has 30 minutes."""

    model: str = Field(description="An ONNX file, models:/name/version, models:/name@alias, runs:/..., or s3://...")
    shapes: dict[str, tuple[int, ...]] = Field(default_factory=dict, description="Sizes by input name.")
    target: str = Field(default="cpu", description="cpu, cuda, TVM's JSON, or a key that agents offer.")
    trials: int | None = Field(default=None, ge=0, description="Search trials this run may spend.")
    minutes: float | None = Field(default=None, gt=0, description="Wall-clock time the whole run may take.")
    engine: Literal["relax", "relay"] = "relax"
    granularity: Literal["subgraph", "operator"] = "subgraph"
    layout: Literal["", "channels-last", "as-imported"] = Field(
        default="", description="Of the activations; empty: what is measured to be faster."
    )
    name: str = Field(default="", description="Registered name; by default from the model.")
    seed: int = 0
    floor_trials: int = Field(default=0, ge=0, description="The least search trials that every task gets.")
    priority: int = Field(default=0, description="Agents take a run of a higher priority first.")
    device: str = Field(default="", description="cuda:1, cpu:0-3; by default the first of the target's kind.")

    def child_options(self, info: EngineInfo | None = None) -> ChildOptions:
        """How the engine of this run is started: for ``info``'s target, where agents measure it, only to compile."""
        config = settings()
        threads = config.core_count
        target = self.target if info is None else info.target.spec
        device = self.device if info is None else ""
        device = device or ("cuda:0" if "cuda" in target else f"cpu:0-{threads - 1}")
        return ChildOptions(
            engine=self.engine, python=config.python_of(self.engine), target=target, device=device,
            threads=threads if info is None else info.target.threads, seed=self.seed,
            start_timeout_s=config.engine_start_timeout_s, step_timeout_s=config.step_timeout_s,
            extra_environment=config.engine_environment(self.engine),
        )  # fmt: skip

    @field_validator("name")
    @classmethod
    def _registrable(cls, name: str) -> str:
        if name and not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            raise ValueError("MLflow's registry takes letters, digits, - and _")
        return name

    @model_validator(mode="after")
    def _with_budget(self) -> TuneParameters:
        if self.trials is None and self.minutes is None:
            self.minutes = DEFAULT_MINUTES
        return self
