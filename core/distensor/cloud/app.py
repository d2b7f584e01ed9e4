"""The application: routes, errors and the document that describes them."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from distensor import __version__
from distensor.cloud import problems
from distensor.cloud.context import Context
from distensor.cloud.layers import Outermost
from distensor.cloud.routes import accounts, audit, health, jobs, keys, money, nodes, payouts, runs

ROUTERS = (
    health.router,
    keys.router,
    accounts.router,
    nodes.router,
    jobs.router,
    runs.router,
    money.router,
    payouts.router,
    audit.router,
)
ABOUT = (
    "What a disTensor hub knows and does, beside its control plane. Keys stand in the header Authorization and nowhere "
    "else; errors are problems as in RFC 9457; what belongs to another account reads like what does not exist."
)
_EXPOSED = ("ETag", "Location", "Retry-After", "X-Request-Id")


def make_app(context: Context) -> FastAPI:
    """All routes over a hub, without what stands before them."""
    app = FastAPI(
        title="disTensor hub",
        version=__version__,
        description=ABOUT,
        openapi_url="/v1/openapi.json",
        docs_url=None,  # pages with scripts of other hosts
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.context = context
    problems.install(app)
    for router in ROUTERS:
        app.include_router(router)
    _say_what_comes_back(app)
    return app


def _say_what_comes_back(app: FastAPI) -> None:
    """Problems have their own media type; the framework would write application/json beside it."""
    made = app.openapi

    def openapi() -> dict[str, Any]:
        document = made()
        for path in document["paths"].values():
            for operation in path.values():
                for parameter in operation.get("parameters", ()):
                    _without_null(parameter)
                for status, answer in operation["responses"].items():
                    _as_problem(status, answer)
        return document

    app.openapi = openapi  # type: ignore[method-assign]  # the way that the framework gives for it


def _without_null(parameter: dict[str, Any]) -> None:
    """A parameter that is left out is not one whose text is `null`."""
    schema = parameter["schema"]
    if "anyOf" in schema:
        schema.update(next(one for one in schema.pop("anyOf") if one != {"type": "null"}))


def _as_problem(status: str, answer: dict[str, Any]) -> None:
    content = answer.get("content", {})
    if int(status) >= 400 and "application/json" in content:
        content[problems.MEDIA_TYPE] = content.pop("application/json")


def wrapped(context: Context) -> ASGIApp:
    """The application behind all that a request passes first."""
    app: ASGIApp = make_app(context)
    settings = context.settings
    if settings.origins:
        app = CORSMiddleware(
            app,
            allow_origins=settings.origins,
            allow_methods=("GET", "POST", "PATCH"),
            allow_headers=("Authorization", "Content-Type", "Idempotency-Key", "If-Match", "If-None-Match"),
            expose_headers=_EXPOSED,
            max_age=600,
        )
    inside = context.inside
    return Outermost(app, settings, context.metrics.http, inside.clock, inside.log)
