"""Routes of OpenAI's and vLLM's that are none of this server's business: each says so."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from forerun.server.errors import error_response

PATHS = {
    "/v1/embeddings": "embeddings",
    "/v2/embed": "embeddings",
    "/pooling": "pooling",
    "/classify": "classification",
    "/score": "scores",
    "/v1/score": "scores",
    "/rerank": "ranking",
    "/v1/rerank": "ranking",
    "/v2/rerank": "ranking",
    "/v1/moderations": "moderation",
    "/v1/images/generations": "images",
    "/v1/images/edits": "images",
    "/v1/images/variations": "images",
    "/v1/audio/speech": "audio",
    "/v1/audio/transcriptions": "audio",
    "/v1/audio/translations": "audio",
    "/v1/messages": "Anthropic's form: send /v1/chat/completions",
    "/v1/messages/count_tokens": "Anthropic's form: send /tokenize",
    "/v1/chat/completions/batch": "batches: send several requests at once",
    "/v1/batches": "batches: send several requests at once",
    "/v1/files": "files",
    "/v1/fine_tuning/jobs": "training over HTTP",
    "/v1/load_lora_adapter": "LoRA adapters",
    "/v1/unload_lora_adapter": "LoRA adapters",
}

router = APIRouter()


async def _answer(request: Request) -> Response:
    path = request.url.path.removeprefix(request.scope.get("root_path", ""))
    return error_response(404, f"{path} is not served: this server generates text; it has no {PATHS[path]}")


for _path in PATHS:
    router.add_api_route(_path, _answer, methods=["POST"], include_in_schema=False)
