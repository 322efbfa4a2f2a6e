"""The look of all pages, in light and dark."""

from sparge.masks.plot import DARK, LIGHT, Theme


def _theme_variables(theme: Theme) -> str:
    weak, middle, strong, _ = theme.kept
    return (
        f"--weak:{weak};--middle:{middle};--strong:{strong};"
        f"--kept:{','.join(theme.kept)};--dropped:{','.join(theme.dropped)}"
    )


STYLE = (
    f":root{{--page:#fbfbf9;--paper:#fff;--ink:#1b1f24;--quiet:#5a626c;--line:#d9dbd8;--hatch:#dcdedb;"
    f"--lost:#b3150f;{_theme_variables(LIGHT)}}}"
    f"@media(prefers-color-scheme:dark){{:root{{--page:#111418;--paper:#0b0d10;--ink:#e7e9ec;--quiet:#9aa3ad;"
    f"--line:#30363d;--hatch:#2a3037;--lost:#ff8a75;{_theme_variables(DARK)}}}}}"
    """
*{box-sizing:border-box}
body{margin:0 auto;padding:3rem 1.5rem 4rem;max-width:1200px;background:var(--page);color:var(--ink);
font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
h1{font-size:2rem;line-height:1.2;letter-spacing:-.02em;margin:0 0 .6rem}
h2{font-size:1.3rem;letter-spacing:-.01em;margin:3rem 0 .8rem}
h3{font-size:1.05rem;margin:0}
h4{font-size:.95rem;margin:0}
p{margin:0 0 .8rem;max-width:46rem}
.lead{font-size:1.1rem}
.machine{max-width:none;font-size:.85rem;color:var(--quiet)}
.machine i{font-style:normal;opacity:.5;padding:0 .2em}
small{font-weight:400;color:var(--quiet)}
code{font:.9em ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
.results{width:100%}
.results th,.results td{padding:.45rem .6rem;text-align:right;white-space:nowrap}
.results thead th{font-size:.85rem;font-weight:500;color:var(--quiet);border-bottom:1px solid var(--ink)}
.results th:first-child,.results td:nth-child(2),.results thead th:nth-child(2){text-align:left}
.results th:first-child{padding-left:0}
.results td:last-child,.results thead th:last-child{padding-right:0}
.results th:first-child small{display:block;font-size:.8rem;line-height:1.1}
.results .first>*{border-top:1px solid var(--line)}
.results tbody .first:first-child>*{border-top:0}
.results .same th{visibility:hidden}
.results .same>*{padding-top:0}
.results .same small{display:none!important}
.results td:nth-child(5){font-weight:650}
.notes{display:grid;grid-template-columns:repeat(auto-fit,minmax(20rem,1fr));gap:.7rem 2.5rem;margin:1.4rem 0 0;
font-size:.88rem;line-height:1.45}
.notes dt{font-weight:600}
.notes dd{margin:0;color:var(--quiet)}
.legend{display:flex;flex-wrap:wrap;gap:1rem 3rem;align-items:flex-start;margin:1.4rem 0 0;font-size:.82rem}
.legend p{margin:.15rem 0 0;color:var(--quiet);line-height:1.5}
.ramp{display:block;width:17rem;max-width:100%;height:.8rem}
.ramp.kept{background:linear-gradient(to right,var(--kept))}
.ramp.dropped{background:linear-gradient(to right,var(--dropped));box-shadow:inset 0 0 0 1px var(--line)}
.ticks{display:flex;justify-content:space-between;width:17rem;max-width:100%;font-variant-numeric:tabular-nums}
.swatches p{margin:0}
.swatch{display:inline-block;width:1.6rem;height:.8rem;margin-right:.5rem;vertical-align:-.05rem;
background:var(--paper);border:1px solid var(--line)}
.hatch{background:repeating-linear-gradient(135deg,var(--hatch) 0 1.5px,transparent 1.5px 5px)}
.legend svg{width:1.1rem;height:1.1rem;vertical-align:-.25rem;margin-right:.35rem}
.legend svg+svg,.legend .lost{margin-left:1rem}
figure{margin:2.4rem 0 0}
figcaption{margin-bottom:.9rem}
figcaption p{margin:.15rem 0 0}
.panels{display:grid;grid-template-columns:repeat(3,1fr);gap:1.2rem 1.6rem}
.panel>h4,.panel>p{padding-left:13.2%}
.panel>p{margin:0 0 .35rem;font-size:.85rem;color:var(--quiet);font-variant-numeric:tabular-nums}
.panel>svg{display:block;width:100%;height:auto;overflow:visible}
svg text{font-size:10.5px;fill:var(--quiet);font-variant-numeric:tabular-nums}
svg .axis{font-size:11px}
.coarse{image-rendering:pixelated}
.idea{display:grid;grid-template-columns:repeat(3,1fr);gap:1.2rem 2.4rem;margin:1rem 0 0;padding:0;list-style:none}
.idea h3{margin:.5rem 0 .2rem}
.idea p{margin:0;font-size:.92rem;line-height:1.5}
.schematic{display:block;width:100%;max-width:15rem}
.schematic text{font-size:1.5px}
.schematic .border{fill:none;stroke:var(--quiet);stroke-width:.12}
.schematic .cut{fill:none;stroke:var(--ink);stroke-width:.14}
.level1{fill:var(--weak)}
.level2{fill:var(--middle)}
.level3{fill:var(--strong)}
.told{color:var(--quiet);font-size:.92rem}
pre{margin:0;overflow-x:auto}
main code{overflow-wrap:anywhere}
.dark{display:none}
.paper{fill:var(--paper)}
.frame{fill:none;stroke:var(--line)}
.tick{stroke:var(--quiet);fill:none}
.future{fill:url(#hatch)}
.hatching{stroke:var(--hatch);stroke-width:3}
.mark circle,.mark path{fill:none;stroke:var(--ink);stroke-width:1.6}
.mark .halo{stroke:var(--paper);stroke-width:4.5}
.mark.lost circle:not(.halo),.mark.lost path{stroke:var(--lost)}
.mark text{fill:var(--ink);font-weight:600;paint-order:stroke;stroke:var(--paper);stroke-width:3px}
.mark.lost text{fill:var(--lost)}
.needles{margin-top:1rem;font-size:.88rem}
.needles p{margin:0 0 .3rem;color:var(--quiet)}
.needles th,.needles td{padding:.15rem .9rem .15rem 0;text-align:right;min-width:3.4rem}
.needles th:first-child{text-align:left;font-weight:500}
.needles thead th{color:var(--quiet);font-weight:500;border-bottom:1px solid var(--line)}
.needles .low{color:var(--lost)}
footer{margin-top:3rem;padding-top:1rem;border-top:1px solid var(--line);font-size:.85rem;color:var(--quiet)}
@media(prefers-color-scheme:dark){.dark{display:inline}.light{display:none}}
@media(max-width:900px){.panels{grid-template-columns:1fr;max-width:30rem}}
@media(max-width:860px){
body{padding:1.6rem 1rem 3rem}
h1{font-size:1.6rem}
.results thead{display:none}
.results,.results tbody{display:block}
.results tr{display:grid;grid-template-columns:1fr 1fr;gap:.1rem 1.4rem;padding:.7rem 0;
border-top:1px solid var(--line)}
.results .first>*,.results th:first-child{border:0;padding:0}
.results th:first-child{visibility:visible!important;text-align:left}
.results td:last-child{grid-column:1/-1}
.results th:first-child small,.results .same small{display:inline!important}
.results td{display:flex;justify-content:space-between;padding:0;white-space:normal}
.results td::before{content:attr(data-label);color:var(--quiet);font-weight:400}
.results .none{display:none}
.notes,.idea{grid-template-columns:1fr}
.needles th,.needles td{padding-right:.5rem;min-width:2.6rem}
}
"""
)
