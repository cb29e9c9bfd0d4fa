"""Complete verbs, keys and options by TAB in bash, zsh and fish: the verb `completion`."""
