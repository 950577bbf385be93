"""The guide's first program, from "Taking vLLM Apart: A Practical Guide to Disaggregated Serving": three hops."""

import os

import httpx

MODEL = os.environ["MODEL"]
RENDER = os.environ["RENDER"]
ENGINE = os.environ["ENGINE"]

chat_request = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "What is 17 * 23?"}],
    "max_tokens": 2048,
}

with httpx.Client(timeout=60.0) as client:
    # 1. request -> token IDs (no GPU)
    generate_request = client.post(f"{RENDER}/v1/chat/completions/render", json=chat_request).json()

    # 2. token IDs -> token IDs (GPU)
    generate_response = client.post(f"{ENGINE}/inference/v1/generate", json=generate_request).json()

    # 3. token IDs -> ChatCompletionResponse (no GPU)
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
