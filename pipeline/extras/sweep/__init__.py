"""Search values of a training:  python -m pipeline sweep experiment=quickstart sweep=lr"""
