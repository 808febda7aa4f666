"""Episodes to learn from: tasks to play, groups of episodes, demonstrations, pairs.

    tasks.py           what episodes begin with: rows of files or of environments; what is held out
    groups.py          the episodes of one task side by side: GRPO's groups
    demonstrations.py  rows of files as conversations; recorded episodes
    imitation.py       what sft.py learns from, scripted experts included, and what it is tested on
    pairs.py           what dpo.py learns from

Begin with tasks.py. Nothing here is imported by agent.py or anything below it.
"""
