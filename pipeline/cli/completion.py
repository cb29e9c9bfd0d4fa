"""Print what completes verbs, keys and options at TAB:  python -m pipeline completion bash

    source <(python -m pipeline completion bash)                     bash: into ~/.bashrc
    source <(python -m pipeline completion zsh)                      zsh: into ~/.zshrc
    python -m pipeline completion fish | source                      fish: into ~/.config/fish/config.fish

It completes `python -m pipeline <verb>`: keys up to their next dot, options of groups, and files.
The words are written into what is printed, so that TAB starts no Python; print it again after an update. --config-dir DIR adds
the options of a conf folder of your own.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator

from pipeline.cli.command_line import print_user_errors, split_flags
from pipeline.cli.compose import config_folders, group_options, with_registered_models
from pipeline.cli.reference import NAME, keys_of, model_keys
from pipeline.cli.verbs import import_verbs
from pipeline.config.jobs.names import CONFIG_NAMES
from pipeline.config.registry import components
from pipeline.runtime.errors import ConfigError, did_you_mean

GROUPS_WITHOUT_FIELD = ("experiment", "early_stop", "debug")  # of a training
BASH = r"""# completion of `python -m pipeline`, written by `python -m pipeline completion __SHELL__`
__INIT___pipeline_words() {
    case "$1" in
__CASES__
    esac
}
_pipeline_complete() {
    local line="${COMP_LINE:0:COMP_POINT}" cur verb="" word found rest index
    cur="${line##* }"
    COMPREPLY=()
    for (( index = 1; index < COMP_CWORD; index++ )); do
        if [[ "${COMP_WORDS[index]}" == "-m" ]]; then
            word="${COMP_WORDS[index + 1]}"
            if [[ "$word" == pipeline.* ]]; then verb="${word#pipeline.}"
            elif [[ "$word" == "pipeline" ]]; then verb=" "
                (( COMP_CWORD > index + 2 )) && verb="${COMP_WORDS[index + 2]}"
            fi
            break
        fi
    done
    [[ "$line" =~ -m\ +pipeline\.[a-z]*$ ]] && verb="  "
    [[ -z "$verb" ]] && { COMPREPLY=( $(compgen -f -- "$cur") ); return; }
    if [[ "$verb" == "  " ]]; then
        COMPREPLY=( $(compgen -P pipeline. -W "$(_pipeline_words ' ')" -- "${cur#pipeline.}") )
        return
    fi
    for word in $(_pipeline_words "$verb"); do
        [[ "$word" == "$cur"* ]] || continue
        rest="${word#"$cur"}"
        if [[ "${rest%%=*}" == *.* ]]; then word="$cur${rest%%.*}."; fi
        [[ " $found " == *" $word "* ]] || found="$found $word"
    done
    COMPREPLY=( $found )
    [[ ${#COMPREPLY[@]} -eq 0 && "$cur" == *=* ]] && COMPREPLY=( $(compgen -f -- "${cur#*=}") )
    if [[ "$cur" == *=* && "$COMP_WORDBREAKS" == *=* ]]; then
        COMPREPLY=( "${COMPREPLY[@]#"${cur%%=*}="}" )
    fi
    if [[ ${#COMPREPLY[@]} -eq 1 && ( "${COMPREPLY[0]}" == *= || "${COMPREPLY[0]}" == *. ) ]]; then
        compopt -o nospace 2>/dev/null
    fi
}
complete -o default -F _pipeline_complete python python3
"""
FISH = r"""# completion of `python -m pipeline`, written by `python -m pipeline completion fish`
function __pipeline_words
    switch $argv[1]
__CASES__
    end
end
function __pipeline_verb
    set -l words (commandline -opc)
    set -l at (contains -i -- -m $words); or return 1
    set -l module $words[(math $at + 1)]
    if string match -q 'pipeline.*' -- $module
        string replace pipeline. '' -- $module
    else if test "$module" = pipeline
        if test (count $words) -ge (math $at + 2)
            echo $words[(math $at + 2)]
        else
            echo ' '
        end
    else
        return 1
    end
end
for command in python python3
    complete -c $command -n __pipeline_verb -a '(__pipeline_words (__pipeline_verb))'
end
"""


def words_of_verbs(config_dir: str | None = None) -> dict[str, list[str]]:
    """Verb -> commands, keys as `key=` and options as `group=option`; "" -> the verbs. Raises ConfigError for no such folder."""
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
    """`command=` is left out: commands stand as words."""
    yield from (command.name for command in components("verb")[verb].verb.commands)
    conf = config_folders(config_dir)[0]
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


def _cases(words: dict[str, list[str]], line: str) -> str:
    return "\n".join(
        line.format(verb=shlex.quote(verb or " "), words=shlex.quote(" ".join(each))) for verb, each in words.items()
    )


def bash(words: dict[str, list[str]], shell: str = "bash", init: str = "") -> str:
    cases = _cases(words, "        {verb}) echo {words} ;;")
    return BASH.replace("__SHELL__", shell).replace("__INIT__", init).replace("__CASES__", cases)


def zsh(words: dict[str, list[str]]) -> str:
    return bash(words, "zsh", "autoload -U +X compinit && compinit -u\nautoload -U +X bashcompinit && bashcompinit\n")


def fish(words: dict[str, list[str]]) -> str:
    return FISH.replace("__CASES__", _cases(words, "        case {verb}\n            string split ' ' -- {words}"))


SHELLS = {"bash": bash, "zsh": zsh, "fish": fish}


def completion(shell: str, config_dir: str | None = None) -> str:
    """The script. Raises ConfigError for a shell that it has none for."""
    if shell not in SHELLS:
        hint = did_you_mean(shell, SHELLS)
        raise ConfigError(f"completion takes a shell, {', '.join(SHELLS)}; not {shell!r}{hint}")
    return SHELLS[shell](words_of_verbs(config_dir))


def main() -> None:
    with print_user_errors():
        words, flags = split_flags(sys.argv[1:])
        if "--help" in flags:
            print((__doc__ or "").strip())
            return
        print(completion(words[0] if words else "", flags.get("--config-dir")), end="")
