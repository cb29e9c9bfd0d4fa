"""Print a completion script for verbs, keys and options:  python -m pipeline completion bash

    source <(python -m pipeline completion bash)                     bash: into ~/.bashrc
    source <(python -m pipeline completion zsh)                      zsh: into ~/.zshrc
    python -m pipeline completion fish | source                      fish: into ~/.config/fish/config.fish

It completes `python -m pipeline <verb>` and `pipeline <verb>`: keys up to their next dot, options of groups, and files.
The script contains all words, so TAB starts no Python; print it again after an update. --config-dir DIR adds
the options of your own conf folder.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator

from pipeline.cli.command_line import print_user_errors, split_flags
from pipeline.cli.compose import config_folders, group_options, with_registered_models
from pipeline.cli.reference import NAME, keys_of, model_keys
from pipeline.cli.verbs import import_verbs
from pipeline.config.jobs.job import CONFIG_NAMES
from pipeline.config.registry import components
from pipeline.runtime.errors import ConfigError, did_you_mean

# groups of a training that are not fields of a job
GROUPS_WITHOUT_FIELD = ("experiment", "early_stop", "debug")
BASH = r"""# completion of `python -m pipeline`, written by `python -m pipeline completion SHELL`
INIT_pipeline_words() {
    case "$1" in
CASES
    esac
}
_pipeline_complete() {
    local line="${COMP_LINE:0:COMP_POINT}" cur behind found word rest
    cur="${line##* }" behind="${line#*pipeline }"
    COMPREPLY=()
    if [[ "$line" == *"-m pipeline "* || "$line" == "pipeline "* ]]; then
        [[ "$behind" == *" "* ]] || behind="  "
        for word in $(_pipeline_words "${behind%% *}"); do
            [[ "$word" == "$cur"* ]] || continue
            rest="${word#"$cur"}"
            if [[ "${rest%%=*}" == *.* ]]; then word="$cur${rest%%.*}."; fi
            [[ " $found " == *" $word "* ]] || found="$found $word"
        done
        COMPREPLY=( $found )
    fi
    [[ ${#COMPREPLY[@]} -eq 0 ]] && COMPREPLY=( $(compgen -f -- "${cur#*=}") )
    if [[ "$cur" == *=* && "$COMP_WORDBREAKS" == *=* ]]; then
        COMPREPLY=( "${COMPREPLY[@]#"${cur%%=*}="}" )
    fi
    if [[ ${#COMPREPLY[@]} -eq 1 && ( "${COMPREPLY[0]}" == *= || "${COMPREPLY[0]}" == *. ) ]]; then
        compopt -o nospace 2>/dev/null
    fi
}
complete -o default -F _pipeline_complete python python3 pipeline
"""
ZSH_INIT = "autoload -U +X compinit && compinit -u\nautoload -U +X bashcompinit && bashcompinit\n"
FISH = r"""# completion of `python -m pipeline`, written by `python -m pipeline completion fish`
function __pipeline_words
    switch "$argv[1]"
CASES
    end
end
function __pipeline_verb
    set -l line (commandline -cp)
    string match -qr -- '(^|-m )pipeline ' $line; or return 1
    string match -rg -- 'pipeline +(\S+) ' $line; or echo ''
end
for command in python python3 pipeline
    complete -c $command -n '__pipeline_verb >/dev/null' -a '(__pipeline_words (__pipeline_verb))'
end
"""
# Shell -> the script, the value of INIT in it, and the line with the words of a verb.
SHELLS = {
    "bash": (BASH, "", "        {verb}) echo {words} ;;"),
    "zsh": (BASH, ZSH_INIT, "        {verb}) echo {words} ;;"),
    "fish": (FISH, "", "        case {verb}\n            string split ' ' -- {words}"),
}


def words_of_verbs(config_dir: str | None = None) -> dict[str, list[str]]:
    """Return verb -> commands, keys as `key=` and options as `group=option`; "" -> the verbs.

    Raises ConfigError if `config_dir` is not a folder.
    """
    known = import_verbs()
    folders = config_folders(config_dir)
    options = with_registered_models(group_options(folders))
    jobs = {name: job for job, name in CONFIG_NAMES.items()}
    found = {"": list(known), "completion": list(SHELLS)}
    for verb in known:
        if verb in jobs:
            found[verb] = list(dict.fromkeys(_words(verb, jobs[verb], options, config_dir)))
    return found


def _words(verb: str, job: type, options: dict[str, list[str]], config_dir: str | None) -> Iterator[str]:
    """Yield the words of a verb, without `command=`, because commands are positional words."""
    yield from (command.name for command in components("verb")[verb].verb.commands)
    conf = config_folders()
    keys = [key for key in keys_of(job, verb, conf) if key.name != "command"]
    sections = {key.name.partition(".")[0] for key in keys}
    if "model" in sections:
        sections |= {*GROUPS_WITHOUT_FIELD}
    for group in sorted(sections & options.keys()):
        yield from (f"{group}={option}" for option in options[group])
    if "model" in sections:
        keys += [key for of_model in model_keys(conf).values() for key in of_model]
    for key in keys:
        if NAME in key.name:
            yield key.name.partition(NAME)[0]
        elif key.kind.startswith("true or false"):
            yield from (f"{key.name}={value}" for value in ("true", "false"))
        else:
            yield f"{key.name}="
    yield from ("--help", "--cfg", "--config-dir")


def completion(shell: str, config_dir: str | None = None) -> str:
    """Return the script. Raises ConfigError for an unsupported shell."""
    if shell not in SHELLS:
        raise ConfigError(
            f"completion needs a shell, one of {', '.join(SHELLS)}, not {shell!r}{did_you_mean(shell, SHELLS)}"
        )
    script, init, line = SHELLS[shell]
    words = words_of_verbs(config_dir).items()
    cases = (line.format(verb=shlex.quote(verb), words=shlex.quote(" ".join(each))) for verb, each in words)
    return script.replace("SHELL", shell).replace("INIT", init).replace("CASES", "\n".join(cases))


def main() -> None:
    with print_user_errors():
        words, flags = split_flags(sys.argv[1:])
        if "--help" in flags:
            print((__doc__ or "").strip())
            return
        print(completion(words[0] if words else "", flags.get("--config-dir")), end="")
