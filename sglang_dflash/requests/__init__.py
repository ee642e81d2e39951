"""Where the package plugs into SGLang: hooks, arguments, requests, pools and weights."""
