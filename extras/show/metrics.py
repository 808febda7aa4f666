"""What every number means that a run writes: python -m extras.show --metrics prints this table.

A name may end in a pattern: NAME of a part or function, K of a number.
"""
import re
import textwrap

# {name: (unit, what it is, what to look for)}
METRICS = {
    # every line of metrics.jsonl and timing.jsonl
    "step": ("", "Number of the step, from 0. Its eval/ numbers are of the policy before it.", ""),
    "learning_rate": ("", "Step size of AdamW.", "a short warm-up, then a fall to a tenth"),
    "loss": ("", "What the update minimizes; in sft.py and reward_weighted.py nats per token.",
             "a fall in sft.py and dpo.py; in grpo.py its value says nothing: watch reward"),
    "grad_norm": ("", "Norm of the gradient before it is clipped to --max_grad_norm.",
                  "jumps to ten times the usual: they come before a collapse"),
    "seconds": ("s", "Time of a step without its evaluation; in result.json of the whole run.", ""),
    "rollout_seconds": ("s", "Time in which a step's episodes are played.",
                        "usually most of the step; shorter episodes and more rows at once help"),
    "update_seconds": ("s", "Time of a step without its rollout: scoring and updates.", ""),
    "rollout_tokens_per_second": ("tokens/s", "Sampled tokens per second of the rollout.", ""),
    "update_tokens_per_second": ("tokens/s", "Tokens of all forward passes that score or update, "
                                 "per second.", "a larger --batch_size raises it on a GPU"),
    "peak_memory_mb": ("MiB", "Peak so far: allocated on the GPU, or resident without one.",
                       "distance to the card's memory"),
    # the episodes of a step or of an evaluation
    "episodes": ("", "Number of episodes in the means of this line.", ""),
    "success": ("share", "Share of episodes that solve their task.", "a rise: the aim of it all"),
    "success/NAME": ("share", "Success in one of several environments.",
                     "one that falls while others rise"),
    "pass@K": ("share", "Chance that at least one of K episodes of a task solves it.",
               "pass@K far above success: the policy can, but seldom does"),
    "reward": ("", "Mean reward of an episode, after --reward_bias and --reward_scaling.",
               "a rise with success; a rise without it: the reward can be had otherwise"),
    "reward/NAME": ("", "Mean of one part of the reward.", "which part the rise comes from"),
    "reward_histogram": ("episodes", "Counts of the step's rewards in ten bins.",
                         "two heaps: there is something to compare"),
    "turns": ("", "Turns of the model in an episode.", ""),
    "actions": ("", "Tool calls that ran in an episode.", "a fall to 0: tools are given up"),
    "structure": ("share", "Share of turns that were whole and whose tool calls could be read.",
                  "near 1; it falls before success does"),
    "completion": ("share", "Share of episodes that ended by themselves, at no limit.", ""),
    "tool_errors": ("share", "Share of tool calls that failed or could not be read.", "a fall"),
    "tool_timeouts": ("share", "Share of episodes in which a tool ran out of time.", "0"),
    "tokens": ("tokens", "Mean length of an episode, prompt and results included; in sft.py the "
               "trained tokens of the step, in dpo.py all of its tokens.", ""),
    "sampled_tokens": ("tokens", "Mean number of tokens that the policy sampled in an episode.",
                       "growth without success: length is rewarded, or nothing is"),
    "truncated": ("share", "Share of episodes that a token limit cut.",
                  "below 0.2; else raise --max_new_tokens or --max_tokens"),
    "errors": ("share", "Share of episodes that a fault of their environment ended.", "0"),
    "played_success": ("share", "Success in all that a step played, dropped groups included.", ""),
    "reward_min": ("", "Where the histogram begins: the step's smallest reward.", ""),
    "reward_max": ("", "Where the histogram ends: the step's largest reward.", ""),
    "trained_parameters": ("", "Number of weights that train.", ""),
    "parameters": ("", "Number of all weights.", ""),
    # grpo.py
    "groups_dropped": ("groups", "Groups outside --success_rate_lb and _ub, replaced by others.",
                       "many: most tasks are too easy or too hard"),
    "groups_all_right": ("share", "Share of groups in which every episode succeeds.",
                         "above 0.5: take harder tasks"),
    "groups_all_wrong": ("share", "Share of groups in which no episode succeeds.",
                         "above 0.5: take easier tasks, or SFT first"),
    "groups_mixed": ("share", "Share of groups in which some succeed and some fail.", "a lot"),
    "groups_without_signal": ("share", "Share of groups whose advantages are all 0.",
                              "near 1: the step teaches nothing"),
    "advantage_abs": ("", "Mean size of a token's advantage.", "0: the step teaches nothing"),
    "entropy": ("nats/token", "Mean entropy of the policy where it sampled.",
                "a slow fall; near 0 it explores no more, a rise is noise"),
    "kl": ("nats/token", "KL of the policy to the one that this run started from.",
           "a slow rise; above 0.5 the policy has drifted far"),
    "approx_kl": ("nats/token", "KL of the policy before this step's updates to the policy now.",
                  "below 0.1; else lower --learning_rate"),
    "ratio": ("", "Mean of policy / old policy over tokens, in the last update of a step.", "1"),
    "first_ratio": ("", "The same in the first update, before the weights have changed.",
                    "1 but for rounding: else sampler and trainer differ"),
    "gap": ("nats/token", "Mean |log-probability - sampled one|, in the last update.", ""),
    "sampler_gap": ("nats/token", "The same in the first update: the sampler against the trainer.",
                    "rounding alone, 1e-6 in float32, below 0.1 in 16 bits"),
    "clip_low": ("share", "Share of tokens whose ratio is clipped from below.", "below 0.2"),
    "clip_high": ("share", "Share of tokens whose ratio is clipped from above.", "below 0.2"),
    "phi": ("", "Mean weight of vespo.", ""),
    "importance_weight": ("", "Mean of min(trainer / sampler, C), --importance_correction.", "1"),
    "importance_capped": ("share", "Share of tokens whose weight reaches C.", "below 0.05"),
    "staleness": ("steps", "Versions of the policy since these episodes were played.", "0 or 1"),
    # reward_weighted.py
    "updates": ("", "Updates of the step.", ""),
    "weight_mean": ("", "Mean weight of an episode or turn.", ""),
    "weight_max": ("", "Largest weight.", ""),
    "kept": ("share", "Share of episodes or turns with a weight above 0.", "0 teaches nothing"),
    "clipped": ("share", "Share of weights that --max_weight clips.", "many: raise --beta"),
    "weights_equal": ("", "1 if all weights are equal: rewards say nothing, it is SFT.", "0"),
    "ess": ("", "Effective number of episodes or turns: (sum w)^2 / sum w^2.",
            "a few of many: raise --beta"),
    # dpo.py
    "loss/NAME": ("", "One term of the loss, with its weight.", ""),
    "accuracy": ("share", "Share of pairs whose chosen episode has the larger implicit reward.",
                 "a rise above 0.5; on held-out pairs, too"),
    "margin": ("", "Implicit reward, beta x log-ratio, of the chosen minus the rejected episode.",
               "a rise"),
    "reward/chosen": ("", "Implicit reward of the chosen episode.", "a fall: lower --beta or "
                      "raise --sft_coef"),
    "reward/rejected": ("", "Implicit reward of the rejected episode.", "a fall"),
    "logprobs/chosen": ("nats", "Log-probability of the chosen episode.", "no fall"),
    "logprobs/rejected": ("nats", "Log-probability of the rejected episode.", "a fall"),
    # evaluations
    "eval/NAME": ("", "NAME on held-out tasks (--eval_every), before this step's update.",
                  "a gap to the same number in training: it learns the tasks by heart"),
    "pairs/NAME": ("", "NAME of dpo.py on held-out pairs.", "a gap to the same in training"),
    "pairs/count": ("pairs", "Number of held-out pairs.", ""),
    "demonstrations": ("", "Number of held-out demonstrations, whose loss is evaluated.", ""),
    # result.json
    "success_before": ("share", "Success on held-out tasks before training.", ""),
    "success_after": ("share", "Success on held-out tasks after training.",
                      "an interval that leaves out what it was before"),
    "before": ("", "All numbers of the evaluation before training.", ""),
    "after": ("", "All numbers of the evaluation after training.", ""),
    "held_out_tasks": ("tasks", "Number of tasks that were played before and after.",
                       "200 tasks tell success apart to 0.07"),
    "steps": ("steps", "Number of steps that were trained.", ""),
    "seed": ("", "Seed of all random draws.", "the spread over three seeds or more"),
    "held_out_loss": ("nats/token", "Loss on held-out demonstrations or pairs.", "a fall"),
    "held_out_accuracy": ("share", "Accuracy on held-out pairs.", "above 0.5"),
    "held_out_margin": ("", "Margin on held-out pairs.", "above 0"),
    "pairs": ("pairs", "Number of pairs that were learned from.", ""),
}


def meaning(name: str):
    """Return (unit, sentence, what to look for) of a number, or None if it is not in the table."""
    pattern = re.sub("/.+", "/NAME", re.sub("@[0-9]+$", "@K", name))
    return METRICS.get(name) or METRICS.get(pattern)


def print_metrics():
    """Print the table."""
    for name, (unit, sentence, look_for) in METRICS.items():
        print(f"{name} ({unit})" if unit else name)
        text = f"{sentence} Look for: {look_for}." if look_for else sentence
        print(textwrap.indent(textwrap.fill(text, 76), "    "))
