// The ledger, and the Gantt of an iteration, from traces
const CAUSES = { busy: "--c2", first: "--c1", starved: "--c5", environment: "--c5", tail: "--c4", publish: "--c3", bubble: "--c0", evaluation: "--c6", idle: "--c7" };
function showLedger() {
  fill("ledger", summary.runs.filter(run => run.trace?.accounts).flatMap(run => ["rank", "engine"].map(kind => {
    const accounts = run.trace.accounts.filter(account => account[1] === kind), causes = run.trace.causes[kind];
    if (!accounts.length) return null;
    const title = `Ledger of ${kind}s${summary.runs.length > 1 ? `: ${run.label}` : ""}, over ${plural(run.trace.num_iterations, "iteration")}`;
    const rows = accounts.map(([name, , wall, seconds]) => [name, duration(wall), ...causes.map(cause => {
      const share = seconds[cause] / (wall || 1);
      return share ? h("span", {}, h("span", { class: "share", style: { width: `${Math.round(share * 50)}px`, background: `var(${CAUSES[cause] ?? "--c7"})` } }), ` ${(100 * share).toFixed(1)}%`) : "–";
    })]);
    return h("div", { class: "panel", style: { marginTop: ".9rem" } }, h("h3", {}, title),
      h("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": title }, table([kind, "time", ...causes], rows, title, false)));
  })));
}
const SPAN_COLOURS = { forward: "--c0", backward: "--c3", generate: "--c2", wait: "--c1", queue: "--c7", reward: "--c6", publish: "--c4", evaluate: "--c5", evaluation: "--c5", optimizer: "--c5", update: "--c5" };
class Gantt {
  constructor(iteration) {
    this.iteration = iteration; this.from = 0; this.to = iteration.seconds; this.lanes = []; this.spans = [];
    let top = 0;
    for (const [name, spans] of iteration.lanes) {
      const rows = spans.reduce((most, [row]) => Math.max(most, row + 1), 1), first = top;
      for (const [row, what, begin, length, number, amount, details] of spans)
        this.spans.push({ lane: name, what, begin: begin / 1e6, end: (begin + length) / 1e6, y: first + row, number, amount, details });
      this.lanes.push([first + rows / 2, name]);
      // Names need some room.
      top += Math.max(rows, 2) + 1;
    }
    this.rows = top;
    this.said = h("p", { class: "muted", "aria-live": "polite", style: { minHeight: "1.5em" } }, "Point at a span to read it.");
    this.plot = h("div", { class: "plot", tabindex: "0", role: "group", "aria-roledescription": "chart", style: { height: `${Math.min(640, 60 + Math.max(top * 8, this.lanes.length * 20))}px` },
      "aria-label": "The steps of every process in the iteration. Arrow keys move, plus and minus zoom, 0 shows all. The longest spans are in the table below.", onkeydown: event => this.press(event) });
    this.table = h("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "The longest spans in view" });
    this.details = h("details", { ontoggle: () => this.tabulate() }, h("summary", {}, "The longest spans in view, as a table"), this.table);
    this.colours = Object.fromEntries([...new Set(this.spans.map(span => span.what))].map((name, place) => [name, SPAN_COLOURS[name] ?? COLOURS[place % 8]]));
    this.element = [h("ul", { class: "legend" }, Object.entries(this.colours).map(([name, of]) => h("li", { class: "muted" }, h("i", { style: { borderColor: `var(${of})` } }), `${name} `))),
      this.said, this.plot, this.details];
    this.options = { own: this };
    shown.set(this.plot, this);
    watcher.observe(this.plot);
  }
  async draw() {
    await loadLibrary();
    const text = colour("--muted"), line = colour("--line");
    const colours = Object.fromEntries(Object.entries(this.colours).map(([name, of]) => [name, colour(of)]));
    const figure = new Bokeh.Plotting.Figure({ sizing_mode: "stretch_both", toolbar_location: null, tools: matchMedia("(pointer: coarse)").matches ? "" : "xbox_zoom",
      x_range: new Bokeh.Range1d({ start: this.from, end: this.to }), y_range: new Bokeh.Range1d({ start: this.rows, end: 0 }),
      background_fill_alpha: 0, border_fill_alpha: 0, outline_line_color: null, min_border: 4 });
    for (const axis of [figure.xaxis, figure.yaxis]) Object.assign(axis, { major_label_text_color: text, axis_line_color: line, major_tick_line_color: line,
      minor_tick_line_color: null, major_label_text_font_size: "11px", major_label_text_font: "system-ui" });
    figure.xaxis.axis_label = "seconds"; figure.xaxis.axis_label_text_color = text;
    figure.yaxis.ticker = new Bokeh.FixedTicker({ ticks: this.lanes.map(([at]) => at) });
    figure.yaxis.major_label_overrides = new Map(this.lanes);
    figure.ygrid.grid_line_color = null; figure.xgrid.grid_line_color = line;
    figure.quad({ field: "left" }, { field: "right" }, { field: "top" }, { field: "bottom" }, { fill_color: { field: "colour" }, line_color: colour("--surface"), line_width: 0.5,
      source: new Bokeh.ColumnDataSource({ data: { left: this.spans.map(span => span.begin), right: this.spans.map(span => span.end), top: this.spans.map(span => span.y + 0.08),
        bottom: this.spans.map(span => span.y + 0.92), colour: this.spans.map(span => colours[span.what]) } }) });
    figure.on_event("mousemove", event => this.point(event.x, event.y));
    figure.on_event("tap", event => this.point(event.x, event.y));
    figure.on_event("doubletap", () => this.zoom(0, this.iteration.seconds));
    figure.on_event("rangesupdate", event => this.zoom(event.x0, event.x1));
    this.model = figure;
    this.plot.replaceChildren();
    this.view = await Bokeh.Plotting.show(figure, this.plot);
    hush(this.plot);
  }
  zoom(from, to) {
    const all = this.iteration.seconds, size = Math.min(all, Math.max(to - from, 1e-5));
    this.from = Math.min(Math.max(0, from), all - size); this.to = this.from + size;
    this.model?.x_range.setv({ start: this.from, end: this.to });
    this.tabulate();
  }
  press(event) {
    const size = this.to - this.from, middle = (this.from + this.to) / 2;
    const keys = { ArrowRight: () => this.zoom(this.from + size / 5, this.to + size / 5), ArrowLeft: () => this.zoom(this.from - size / 5, this.to - size / 5),
      "+": () => this.zoom(middle - size / 4, middle + size / 4), "=": () => this.zoom(middle - size / 4, middle + size / 4), "-": () => this.zoom(middle - size, middle + size), "0": () => this.zoom(0, this.iteration.seconds) };
    if (keys[event.key] && !event.ctrlKey && !event.metaKey) { keys[event.key](); event.preventDefault(); }
  }
  describe(span) {
    const details = Object.entries(span.details).map(([name, value]) => value === true ? name : `${name} ${value}`);
    return [span.what, span.number === null ? null : `number ${span.number}`, ...details, span.amount === null ? null : plural(span.amount, "token")].filter(Boolean).join(", ");
  }
  point(x, y) {
    const span = this.spans.find(one => one.y <= y && y < one.y + 1 && one.begin <= x && x <= one.end);
    this.said.textContent = span ? `${span.lane}: ${this.describe(span)} · ${number((span.end - span.begin) * 1e3)} ms from ${number(span.begin)} s` : "Point at a span to read it.";
  }
  tabulate() {
    if (!this.details.open) return;
    const inside = this.spans.filter(span => span.end > this.from && span.begin < this.to).sort((a, b) => (b.end - b.begin) - (a.end - a.begin)).slice(0, 50);
    this.table.replaceChildren(table(["lane", "what", "from, s", "ms"], inside.map(span => [span.lane, this.describe(span), number(span.begin), number((span.end - span.begin) * 1e3)]), "The longest spans in view", false));
  }
}
function showGantt() {
  forget("gantt");
  const runs = summary.runs.filter(run => run.trace?.iterations?.length);
  const problems = summary.runs.filter(run => run.trace?.problem).map(run => h("p", { class: "bad" }, run.trace.problem));
  if (!runs.length) { fill("gantt", problems); return; }
  const box = h("div", {});
  const choices = runs.flatMap(run => run.trace.iterations.map(iteration => [iteration, `${runs.length > 1 ? `${run.label}: ` : ""}iteration ${iteration.version}, ${duration(iteration.seconds)}`]));
  const show = () => {
    forget("gantt");
    const iteration = choices[select.value][0];
    box.replaceChildren(...new Gantt(iteration).element, h("p", { class: "muted" }, [
      iteration.num_left_out ? `${plural(iteration.num_left_out, "span")} are left out: too short, or beyond the bound.` : null,
      iteration.error === null ? null : ` Clocks of processes agree within ${number(iteration.error * 1e3)} ms.`].filter(Boolean).join("")));
  };
  const select = h("select", { onchange: show }, choices.map(([, text], place) => h("option", { value: place }, text)));
  // The time after the last update is an iteration without a pass.
  const isWhole = ([iteration]) => iteration.lanes.some(([, spans]) => spans.some(([, what]) => what === "forward"));
  select.value = Math.max(0, choices.findLastIndex(isWhole));
  fill("gantt", problems, h("div", { class: "panel", style: { marginTop: ".9rem" } }, h("div", { class: "bar" }, h("h3", {}, "An iteration"), h("label", {}, "Which ", select)),
    h("p", { class: "muted" }, "The first, the slowest and the newest are shown; megatron-rl trace has all."), box));
  show();
}

