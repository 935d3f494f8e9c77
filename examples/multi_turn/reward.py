"""Reward of the calculator example: the model's last turn has to be the answer, of the tool.

acc: the last turn is the number and nothing else. called: the model has read a tool's result.
"""


def compute_score(data_source, solution_str, ground_truth, extra_info):
    messages = extra_info["messages"]
    turns = messages[1 + max(i for i, m in enumerate(messages) if m["role"] == "user") :]
    last = turns[-1]["content"].strip() if turns else ""
    results = [turn["content"] for turn in turns if turn["role"] == "tool"]
    acc = last == ground_truth and turns[-1]["role"] == "assistant"
    called = any(not text.startswith("Error") for text in results)
    right = ground_truth in results
    return {"score": acc + 0.2 * right + 0.1 * called, "acc": acc, "called": called}
