"""The guide's third program: both splits together, prefill and decode between render and derender."""

import os

import httpx

MODEL = os.environ["MODEL"]
RENDER, PREFILL, DECODE = os.environ["RENDER"], os.environ["PREFILL"], os.environ["DECODE"]

chat_request = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "What is 17 * 23?"}],
    "max_tokens": 2048,
}

with httpx.Client(timeout=60.0) as client:
    # 1. Render: request -> token IDs (no GPU)
    generate_request = client.post(f"{RENDER}/v1/chat/completions/render", json=chat_request).json()

    # 2. Prefill: compute the KV cache, generate one token, hold the blocks
    prefill_response = client.post(
        f"{PREFILL}/inference/v1/generate",
        json={
            **generate_request,
            "sampling_params": {**generate_request["sampling_params"], "max_tokens": 1},
            "kv_transfer_params": {"do_remote_decode": True},
        },
    ).json()

    # 3. Decode: pull prefill's blocks over NIXL, then generate
    generate_response = client.post(
        f"{DECODE}/inference/v1/generate",
        json={
            **generate_request,
            "kv_transfer_params": prefill_response["kv_transfer_params"],
        },
    ).json()

    # 4. Derender: token IDs -> ChatCompletionResponse (no GPU)
    response = client.post(
        f"{RENDER}/v1/chat/completions/derender",
        json={
            "model": MODEL,
            "generate_response": generate_response,
            "prompt_tokens": len(generate_request["token_ids"]),
            "chat_request": chat_request,
        },
    ).json()

message = response["choices"][0]["message"]
print(message["reasoning"], message["content"], sep="\n---\n")
