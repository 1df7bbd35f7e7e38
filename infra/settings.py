"""Every setting of Tunewright, read once from the environment and an optional ``.env`` file."""

from __future__ import annotations

import os
import sys
from functools import lru_cache
from pathlib import Path

from pydantic import AliasChoices, Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """Names in the environment are the fields' names in capitals, after ``TUNEWRIGHT_``."""

    model_config = SettingsConfigDict(env_prefix="TUNEWRIGHT_", env_file=".env", extra="ignore")

    home: Path = Field(
        default=Path.home() / ".tunewright",
        description="Journals, caches and, with no service configured, the store and MLflow's database.",
    )
    store: str = Field(
        default="",
        description="Object store: s3://bucket/prefix or a directory. Default: HOME/store.",
    )
    tracking_uri: str = Field(
        default="",
        validation_alias=AliasChoices("TUNEWRIGHT_TRACKING_URI", "MLFLOW_TRACKING_URI"),
        description="MLflow server or database. Default: sqlite under HOME.",
    )
    experiment: str = Field(default="tunewright", description="MLflow experiment of the tuning runs.")
    s3_endpoint_url: str = Field(
        default="",
        validation_alias=AliasChoices("TUNEWRIGHT_S3_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
        description="S3 endpoint for stores other than AWS.",
    )
    relax_python: Path = Field(
        default=Path(sys.executable),
        description="Interpreter of the relax engine; it must hold apache-tvm.",
    )
    relay_python: Path = Field(
        default=Path(__file__).parent.parent / ".venv-relay" / "bin" / "python",
        description="Interpreter of the relay engine; it must hold a TVM with Relay and AutoTVM.",
    )
    relay_tuner: str = Field(default="xgb", description="AutoTVM's tuner of the relay engine: xgb, ga, random, grid.")
    threads: int = Field(
        default=0,
        ge=0,
        description="CPU threads a model is tuned and run with; 0: all cores of this process.",
    )
    engine_start_timeout_s: float = Field(default=120.0, description="How long an engine may take to start.")
    step_timeout_s: float = Field(default=1800.0, description="How long one engine step may take.")

    measure_number: int = Field(default=1, ge=1, description="Calls in one repeat of a timing, at least.")
    measure_repeat: int = Field(default=5, ge=1, description="Repeats of a timing.")
    measure_min_repeat_ms: int = Field(default=20, ge=0, description="Milliseconds that one repeat lasts at least.")
    measure_cooldown_ms: int = Field(
        default=0, ge=0, description="Pause between a candidate's first call and its timing."
    )
    measure_flush_cache: bool | None = Field(
        default=None,
        description="Time single calls, each after the cache was flushed (on a GPU, the L2). Default: on CPUs, for "
        "models whose weights take more than half of the last-level cache.",
    )

    scheduler: str = Field(
        default="", description="Dask scheduler of the fleet, tls://host:port; without one, this machine measures."
    )
    tls_dir: Path | None = Field(
        default=None, description="Certificates of the fleet, made by 'tunewright certs'. Default: HOME/tls."
    )
    agents_per_run: int = Field(default=0, ge=0, description="Agents that one run may use at a time; 0: all.")
    session_timeout_s: float = Field(
        default=900.0, gt=0, description="A session on an agent that takes longer is given to another."
    )
    outage_patience_s: float = Field(
        default=900.0, ge=0, description="How long a run waits for a store, MLflow or agents that are away."
    )

    webhook_secret: SecretStr = Field(
        default=SecretStr(""), description="What MLflow signs its deliveries with; without it none is received."
    )
    webhook_body_bytes: int = Field(default=65536, ge=1024, description="Largest delivery that is read.")
    start_attempts: int = Field(
        default=3, ge=1, description="Runs that are started for one model version and target until one succeeds."
    )
    nightly_hours: float = Field(default=6.0, gt=0, description="Wall-clock hours that a night may take.")
    nightly_minutes: float = Field(
        default=30.0, gt=0, description="Minutes for a model whose tags name neither minutes nor trials."
    )
    nightly_models: int = Field(default=1, ge=1, description="Models that are tuned at the same time at night.")
    nightly_least_gain: float = Field(
        default=0.005, ge=0, description="A model of which less is expected, as a share of its latency, is skipped."
    )
    nightly_again_days: float = Field(
        default=30.0, gt=0, description="A model with nothing to gain is tuned again after so many days."
    )

    @property
    def store_url(self) -> str:
        """The object store in use."""
        return self.store or str(self.home / "store")

    @property
    def tracking(self) -> str:
        """The MLflow tracking URI in use."""
        return self.tracking_uri or f"sqlite:///{self.home / 'mlflow.db'}"

    @property
    def certificates(self) -> Path:
        """The folder of the fleet's certificates."""
        return self.tls_dir or self.home / "tls"

    def python_of(self, engine: str) -> str:
        """The interpreter that ``engine`` runs in."""
        return str(self.relay_python if engine == "relay" else self.relax_python)

    def engine_environment(self, engine: str) -> tuple[tuple[str, str], ...]:
        """What ``engine`` reads from its environment beside its options."""
        return (("TUNEWRIGHT_RELAY_TUNER", self.relay_tuner),) if engine == "relay" else ()

    @property
    def core_count(self) -> int:
        """The threads to tune with: the setting, or the cores that this process may use."""
        return self.threads or len(os.sched_getaffinity(0))


@lru_cache(maxsize=1)
def settings() -> Settings:
    """The settings of this process."""
    return Settings()
