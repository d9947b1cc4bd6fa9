#!/usr/bin/env python3
"""Takes plots out of a page that `kvasir replay --html` wrote, as files of their own.

    plots.py report.html FOLDER throughput-latency ttft-cdf-1
"""

import re
import sys

STYLE = (
    "<style>svg{background:#fff}.grid{stroke:#ddd}.tick,.label{font:12px sans-serif;fill:#333}"
    ".line{fill:none}</style>"
)


def main():
    page, folder, *names = sys.argv[1:]
    with open(page, encoding="utf-8") as file:
        text = file.read()
    for name in names:
        found = re.search(rf'<figure id="{name}">(<svg.*?</svg>)', text, re.DOTALL)
        plot = found.group(1)
        width, height = re.search(r'viewBox="0 0 (\S+) (\S+)"', plot).groups()
        lines = re.findall(r'stroke="(#\w+)" stroke-width="2" stroke-dasharray="([^"]*)"><title>([^<]*)<', plot)
        legend = "".join(
            f'<path d="M70 {34 + 16 * at}h22" stroke="{color}" stroke-width="2" stroke-dasharray="{dash}"/>'
            f'<text class="tick" x="98" y="{38 + 16 * at}">{label}</text>'
            for at, (color, dash, label) in enumerate(lines)
        )
        plot = plot.replace("<svg ", f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" ', 1)
        head, rest = plot.split(">", 1)
        with open(f"{folder}/{name}.svg", "w", encoding="utf-8") as out:
            out.write(f"{head}>{STYLE}\n" + rest.replace("</svg>", f"{legend}</svg>") + "\n")


if __name__ == "__main__":
    main()
