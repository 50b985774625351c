"""A plain FastAPI server of a trained run, as one writes it in an hour.

python tools/peers/plain_fastapi.py RUN --port 8001
"""

import argparse
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel

import distembed
from distembed.base.errors import UserError


class Rows(BaseModel):
    """The body of a request."""

    rows: list[dict[str, Any]]


def make_app(run: str) -> FastAPI:
    """Returns an application that serves a run."""
    model = distembed.load(run)
    app = FastAPI()

    @app.post("/predict")
    def predict(body: Rows) -> dict[str, list[float]]:
        try:
            return {"prediction": model.predict(body.rows).tolist()}
        except UserError as error:
            raise HTTPException(422, str(error)) from error

    return app


def main() -> None:
    """Loads the run and serves it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run")
    parser.add_argument("--port", type=int, default=8001)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    uvicorn.run(make_app(arguments.run), host="127.0.0.1", port=arguments.port, log_level="warning", access_log=False)


if __name__ == "__main__":
    main()
