def compute_score(data_source, solution_str, ground_truth, extra_info):
    """1 for the right number and nothing else, a tenth for a digit that is wrong by one."""
    answer = solution_str.strip()
    if answer == ground_truth:
        return 1.0
    return 0.1 if answer.isdigit() and abs(int(answer) - int(ground_truth)) == 1 else 0.0
