-- Run once, when PostgreSQL's volume of compose.yaml is new.
CREATE DATABASE prefect;
CREATE DATABASE mlflow;
