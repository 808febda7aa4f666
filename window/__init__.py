"""Windows: what people look at and talk to.

    chat.py     `python agent.py`: a chat, or with --num_tasks episodes in a file (traces.py)
    report.py   report.html of a run: result, curves (curves.py), episodes token by token
    server.py   `python agent.py --serve`: OpenAI's API (requests.py: what may be asked;
                player.py samples)
    merge.py    `python lora.py merge`: an adapter becomes a plain model folder

Begin with report.py. The rest of the project enters in three places: a run that has finished writes
its page, `python agent.py` opens the chat, and `python lora.py` merges.
"""
