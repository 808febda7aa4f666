"""From flags to an output folder to a report: everything in a run that has no equation.

What the algorithms, agent.py and lora.py use is imported here. The modules of this package import
each other directly.
"""
from experiment.config import (EnvironmentFlags, MemoryFlags, ModelFlags, RolloutFlags, RunFlags,
                               TrainingFlags, auto, check_accumulation, fill, flag,
                               imitation_learning_rate, nearest, preference_learning_rate)
from experiment.episodes import (is_finite, members, pass_at_k, problem, shift_and_scale, summarise,
                                 unusable, without_faults, without_too_long)
from experiment.errors import EnvironmentFault, UserError
from experiment.files import replace_file, to_json
from experiment.process import give_back_memory
from experiment.program import main
from experiment.run import Run
from experiment.seeds import mix
