(() => {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const plots = [...document.querySelectorAll(".plot")].map((place) => ({
    place,
    drawn: place.nextElementSibling.textContent,
  }));
  const isDark = () => (root.dataset.theme || (system.matches ? "dark" : "light")) === "dark";

  // Figures name the page's colours, which Plotly cannot look up.
  const coloured = (text) => {
    const style = getComputedStyle(root);
    const named = (key, value) => {
      const found = typeof value === "string" && /^var\((--[a-z]+)\)$/.exec(value);
      return found ? style.getPropertyValue(found[1]).trim() : value;
    };
    return JSON.parse(text, named);
  };
  const axis = JSON.stringify({
    gridcolor: "var(--grid)", linecolor: "var(--line)", zerolinecolor: "var(--line)", tickcolor: "var(--line)",
    automargin: true, title: { standoff: 8, font: { size: 12 } }, tickfont: { size: 11.5 }, ticks: "outside", ticklen: 4,
  });
  const base = JSON.stringify({
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", size: 12, color: "var(--soft)" },
    margin: { l: 8, r: 10, t: 8, b: 8 },
    hoverlabel: { bgcolor: "var(--card)", bordercolor: "var(--line)", font: { color: "var(--ink)", size: 12.5 } },
    legend: { orientation: "h", x: 0, xanchor: "left", y: 1.02, yanchor: "bottom", traceorder: "normal", font: { size: 12 } },
    colorway: ["var(--blue)", "var(--orange)", "var(--green)", "var(--purple)", "var(--sky)", "var(--grey)"],
  });
  const merged = (under, over) => {
    const result = { ...under };
    for (const [key, value] of Object.entries(over)) {
      const both = value && typeof value === "object" && !Array.isArray(value) && result[key];
      result[key] = both ? merged(result[key], value) : value;
    }
    return result;
  };
  const touch = matchMedia("(hover: none)").matches; // there a drag scrolls the page
  const draw = () => {
    for (const { place, drawn } of plots) {
      const figure = coloured(drawn);
      const layout = merged(coloured(base), figure.layout);
      for (const name of new Set(["xaxis", "yaxis", ...Object.keys(layout).filter((k) => /^[xy]axis\d*$/.test(k))])) {
        layout[name] = merged(coloured(axis), layout[name] || {});
      }
      if (touch) layout.dragmode = false;
      Plotly.react(place, figure.data, layout, { responsive: true, displayModeBar: false });
    }
  };
  document.getElementById("theme").addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    draw();
  });
  system.addEventListener("change", draw);
  draw();

  const tip = document.createElement("div");
  tip.id = "tip";
  tip.hidden = true;
  document.body.append(tip);
  document.addEventListener("pointerover", (event) => {
    const at = event.target.closest("[data-tip]");
    tip.hidden = !at;
    if (!at) return;
    tip.textContent = at.dataset.tip;
    const box = at.getBoundingClientRect();
    const [wide, high] = [tip.offsetWidth, tip.offsetHeight];
    tip.style.left = `${Math.max(8, Math.min(event.clientX - wide / 2, root.clientWidth - wide - 8))}px`;
    tip.style.top = `${box.top > high + 8 ? Math.min(box.top, event.clientY) - high - 8 : event.clientY + 18}px`;
  });
  document.addEventListener("scroll", () => (tip.hidden = true), { passive: true });
})();
(() => {
  const number = (text) => parseFloat((/-?\d+(\.\d+)?/.exec(text.replace(/\u2212/g, "-")) || [])[0]);
  // What has no number goes to the end either way.
  const compare = (texts, sign) => (a, b) => {
    if (texts) return sign * a.localeCompare(b);
    const [x, y] = [number(a), number(b)];
    return Number.isNaN(x) - Number.isNaN(y) || sign * (x - y) || 0;
  };
  for (const button of document.querySelectorAll("button.sort")) {
    button.addEventListener("click", () => {
      const head = button.parentElement;
      const body = head.closest("table").tBodies[0];
      const column = head.cellIndex;
      const texts = head.className === "text";
      const before = head.getAttribute("aria-sort");
      const up = before ? before === "descending" : texts; // numbers begin with the largest
      for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const order = compare(texts, up ? 1 : -1);
      const cell = (row) => row.cells[column].textContent;
      body.append(...[...body.rows].sort((a, b) => order(cell(a), cell(b))));
    });
  }
})();
