"""lm-eval's backends for OpenAI's API, on small tasks of our own. What is compared between
routes is no near tie for the default model."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version

import lm_eval
from lm_eval.tasks import TaskManager

ASKED = json.loads(sys.argv[1])
CHAT = ASKED["backend"] == "local-chat-completions"


def main() -> None:
    path = "/v1/chat/completions" if CHAT else "/v1/completions"
    tasks = ["pdserve_write"] if CHAT else ["pdserve_choose", "pdserve_read", "pdserve_go_on"]
    done = lm_eval.simple_evaluate(
        model=ASKED["backend"],
        model_args={
            "model": ASKED["model"],
            "base_url": ASKED["base_url"] + path,
            "header": {"x-pdserve-mode": ASKED["mode"]},
            "max_retries": 1,
            **({} if CHAT else {"tokenizer": ASKED["tokenizer"]}),
        },
        tasks=tasks,
        task_manager=TaskManager(include_path="tasks", include_defaults=False),
        apply_chat_template=CHAT,
        bootstrap_iters=0,
    )
    samples = [
        (name, one["doc_id"], one["resps"]) for name in tasks for one in done["samples"][name]
    ]
    figures = [
        f", {name.removeprefix('pdserve_')} {metric.partition(',')[0]} {value:.3g}"
        for name in tasks
        for metric, value in done["results"][name].items()
        if isinstance(value, float) and "stderr" not in metric
    ]
    told = {
        "answers": sorted(samples),
        "versions": f"lm-eval {version('lm-eval')}",
        "figures": "".join(figures),
    }
    print(json.dumps(told))


main()
