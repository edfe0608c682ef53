"""What the server says of itself: models, health, metrics, numbers for its page."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from winnow import __version__
from winnow.server.failures import ApiError
from winnow.server.serving import Serving


def status_router(serving: Serving) -> APIRouter:
    """GET endpoints; none of them touches the engine."""
    router = APIRouter()

    @router.get("/v1/models", summary="The model that is served")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(serving)]}

    @router.get("/v1/models/{model:path}", summary="One model", responses=_failing(404))
    async def model(model: str) -> dict[str, Any]:
        serving.check_model(model)
        return _model(serving)

    @router.get("/health", summary="Whether the process lives", response_model=dict[str, str])
    async def health() -> dict[str, str]:
        return {"status": "alive", "version": __version__}

    @router.get(
        "/ready", summary="Whether new requests are taken", responses=_failing(503),
        response_model=dict[str, str],
    )  # fmt: skip
    async def ready() -> Response:
        try:
            serving.admission.check_open()
        except ApiError as failure:
            done, total = serving.loading
            share = f", {100 * done // total}% of its weights read" if total else ""
            if failure.code != "loading":
                return failure.response()
            return ApiError(
                503, f"the model is loading{share}", code="loading", headers=failure.headers
            ).response()
        return JSONResponse({"status": "ready", "model": serving.model_name})

    @router.get("/metrics", summary="Metrics in Prometheus's format", response_class=Response)
    async def metrics() -> Response:
        return Response(serving.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @router.get("/stats", summary="The numbers that the page shows")
    async def stats() -> dict[str, Any]:
        return _stats(serving)

    return router


def _failing(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"description": "an error"} for status in statuses}


def _model(serving: Serving) -> dict[str, Any]:
    return {
        "id": serving.model_name,
        "object": "model",
        "created": serving.created,
        "owned_by": "winnow",
        "max_model_len": serving.info.max_model_len if serving.info else None,
    }


def _stats(serving: Serving) -> dict[str, Any]:
    stats, info, metrics = serving.metrics.stats, serving.info, serving.metrics
    return {
        "model": serving.model_name,
        "version": __version__,
        "ready": info is not None and serving.admission.closed is None,
        "max_model_len": info.max_model_len if info else 0,
        "max_running": info.max_running if info else 0,
        "kv_format": info.kv_format if info else "",
        "index_format": info.index_format if info else "",
        "backend": info.backend if info else "",
        "running": stats.num_running if stats else 0,
        "waiting": stats.num_waiting if stats else 0,
        "pages_used": stats.pages_used if stats else 0,
        "pages_cached": stats.pages_cached if stats else 0,
        "pages_total": stats.pages_total if stats else info.num_pages if info else 0,
        "preemptions": stats.preemptions if stats else 0,
        "prefix_query_tokens": stats.prefix_query_tokens if stats else 0,
        "prefix_hit_tokens": stats.prefix_hit_tokens if stats else 0,
        "generation_tokens": metrics.generation_tokens,
        "prompt_tokens": metrics.prompt_tokens,
    }
