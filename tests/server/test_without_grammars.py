"""A server where the library of grammars, an extra, is not installed."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from support.served import Served

SCHEMA = {"type": "json_object"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def test_what_needs_no_grammar_is_answered_and_what_does_is_told_what_to_install(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = "raise ModuleNotFoundError(\"No module named 'xgrammar'\", name='xgrammar')\n"
    (tmp_path / "xgrammar.py").write_text(missing)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
    with Served(str(tiny), "--num-pages", "16", threads=1) as server:
        url = f"{server.url}/v1/chat/completions"
        assert httpx.post(url, json=body, timeout=60).status_code == 200
        for asked in ({"response_format": SCHEMA}, {"tool_choice": "required", "tools": [TOOL]}):
            refused = httpx.post(url, json={**body, **asked}, timeout=60)
            assert refused.status_code == 400
            assert "winnow-llm[grammar]" in refused.json()["error"]["message"]
        assert httpx.post(url, json=body, timeout=60).status_code == 200
        assert "Traceback" not in server.log()
        assert "requests with grammars are refused" in server.log()
