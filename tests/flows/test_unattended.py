"""The whole path, with nobody watching: a version is registered, the champion alias points at the tuned model."""

from __future__ import annotations

from pathlib import Path

import boto3
import pytest

from benchmarks.fleet_service import BUCKET, whole_path


@pytest.mark.timeout(1500)
def test_a_registered_version_becomes_a_champion(
    deployed_url: str, mlflow_url: str, s3_url: str, tmp_path: Path
) -> None:
    boto3.session.Session().client("s3", endpoint_url=s3_url).create_bucket(Bucket=BUCKET)
    urls = {"MLFLOW_TRACKING_URI": mlflow_url, "PREFECT_API_URL": deployed_url, "AWS_ENDPOINT_URL": s3_url}
    found = whole_path(tmp_path, urls, agents=2, trials=4)
    assert found.ok, found
